"""All that is worth running on the day a GPU is there, in one command.

    python -m benchmarks.gpu_day --minutes 30

    machine  what there is: device, driver, versions, and which sources run
    stages   what to run there, in the order of its worth: command lines, as data
    runner   runs them one by one within the time; keeps what is done, and goes on from there
    page     Markdown of what was kept

A new measurement is one more entry in `stages`; its script writes ``--json``, and prints its table.
"""
