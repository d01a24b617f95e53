"""torch.distributed's objects below `init_process_group`, which its type stubs leave out or do not export."""

from typing import Any, TypeAlias

import torch.distributed

c10d: Any = torch.distributed
Store: TypeAlias = Any
"""Where the ends of a group find each other (torch.distributed.Store)."""
Work: TypeAlias = Any
"""An operation under way (torch.distributed.Work)."""
