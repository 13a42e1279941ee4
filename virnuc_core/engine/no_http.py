"""Keep Dask from starting an HTTP server in the process that imports this module.

Every Dask scheduler and worker starts an HTTP server on all addresses of its machine. Without a
dashboard the server has fewer pages, but it still listens. Dask has no setting that turns it off.

Dask imports this module because of its option `--preload`, before it starts the server. The import
changes Dask, which no other import of virnuc may do. Nodes of a batch system use a copy of this
file, and may not have virnuc, so the file must import nothing of virnuc.
"""

from typing import Any

from distributed.node import ServerNode


def start_no_server(*_: Any, **__: Any) -> None:
    """Do nothing. This replaces the method of Dask that would open a socket."""


ServerNode.start_http_server = start_no_server
