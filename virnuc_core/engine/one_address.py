"""Let a Dask worker listen on one address only, in the process that imports this module.

Without a setting for host or interface, a Dask worker listens on all addresses of its machine. It
needs only the address that the scheduler and the other Dask workers use.

Nodes of a batch system import a copy of this file, as they do with `no_http`. The import changes
Dask, and the file must import nothing of virnuc.
"""

from typing import Any

from distributed.comm import get_address_host
from distributed.utils import get_ip
from distributed.worker import Worker


async def start_on_one_address(worker: Any) -> Any:
    """Start a Dask worker on the one address from which it reaches its scheduler.

    This replaces the method `start_unsafe` of Dask's worker, which was renamed to `start_anywhere`
    and is called at the end. If the user has named a host or an interface, that setting stays.
    """
    if not worker._start_host and not worker._interface:
        worker._start_host = get_ip(get_address_host(worker.scheduler.address))
    return await worker.start_anywhere()


# Dask may import this file more than once. The second time, `start_unsafe` is our own function.
if not hasattr(Worker, "start_anywhere"):
    Worker.start_anywhere = Worker.start_unsafe
    Worker.start_unsafe = start_on_one_address
