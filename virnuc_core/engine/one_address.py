"""Let a Dask worker listen on one address only, in the process that imports this module.

A Dask worker without a named host or interface listens on all addresses of its machine. It needs
only the one by which the scheduler and the other workers know it.

Dask imports a copy of this file on the nodes of a batch system, by its option `--preload`, as it
does with `no_http`. The same holds here: the import changes Dask, and the file imports nothing of
virnuc.
"""

from typing import Any

from distributed.comm import get_address_host
from distributed.utils import get_ip
from distributed.worker import Worker


async def start_on_one_address(worker: Any) -> Any:
    """Take the place of `Worker.start_unsafe`, and name the host where nothing else does."""
    if not worker._start_host and not worker._interface:
        worker._start_host = get_ip(get_address_host(worker.scheduler.address))
    return await worker.start_anywhere()


if not hasattr(Worker, "start_anywhere"):  # Dask imports this file more than once
    Worker.start_anywhere = Worker.start_unsafe
    Worker.start_unsafe = start_on_one_address
