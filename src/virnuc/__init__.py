"""virnuc: which short sequencing reads are viral.

The folders at the top of the repository appear below this package, so that nothing with a common
name such as `flows` is installed: `virnuc.flows`, `virnuc.tasks` and `virnuc.deployments`. The
library itself is `virnuc_core`.
"""

from virnuc_core import __version__

__all__ = ["__version__"]
