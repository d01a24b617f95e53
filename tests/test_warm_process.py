import os
import threading

from support.warm_process import WarmProcess

NUM_THREADS = 3
NUM_TRIES = 10


def test_threads_that_poll_one_process_get_the_same_status(tmp_path):
    """Without a lock 47 of 60 tries had a thread that got 255."""
    for _ in range(NUM_TRIES):
        process = WarmProcess("tahq", ["--version"], tmp_path, dict(os.environ))
        statuses = []

        def ask(process=process, statuses=statuses):
            while (status := process.poll()) is None:
                pass
            statuses.append(status)

        threads = [threading.Thread(target=ask) for _ in range(NUM_THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        process.communicate()
        assert statuses == [0] * NUM_THREADS
