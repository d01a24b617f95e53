"""All rows."""

from chaos.joining_rows import JOINING_ROWS
from chaos.link_rows import LINK_ROWS
from chaos.message_rows import MESSAGE_ROWS
from chaos.recovery_rows import RECOVERY_ROWS
from chaos.row import Row
from chaos.snapshot_rows import SNAPSHOT_ROWS
from chaos.stranger_rows import STRANGER_ROWS
from chaos.worker_rows import WORKER_ROWS

ROWS: tuple[Row, ...] = (
    *RECOVERY_ROWS,
    *SNAPSHOT_ROWS,
    *LINK_ROWS,
    *WORKER_ROWS,
    *JOINING_ROWS,
    *STRANGER_ROWS,
    *MESSAGE_ROWS,
)
