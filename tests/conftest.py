"""One torch thread a process: the models are tiny, and threads that wait for each other cost more than they give."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
