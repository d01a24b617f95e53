"""All rows. What is in `PENDING` is written, and waits for a part of tahq that is not there yet."""

from chaos.link_rows import LINK_ROWS, PENDING_LINK_ROWS
from chaos.message_rows import MESSAGE_ROWS
from chaos.row import Row
from chaos.worker_rows import WORKER_ROWS

ROWS: tuple[Row, ...] = (*LINK_ROWS, *WORKER_ROWS, *MESSAGE_ROWS)
PENDING: tuple[Row, ...] = (*PENDING_LINK_ROWS,)
