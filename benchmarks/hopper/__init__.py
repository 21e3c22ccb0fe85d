"""The Hopper forward on a card: correctness, endurance and speed, in watched processes.

    PYTHONPATH=src python -m benchmarks.hopper check 200     # every named problem against the fp64 oracle
    PYTHONPATH=src python -m benchmarks.hopper stress 200    # 10,000 launches of random shapes under a watchdog
    PYTHONPATH=src python -m benchmarks.hopper check 200 hold    # both also with a change to all plans: see changes.py
    PYTHONPATH=src python -m benchmarks.hopper clock 250     # the table's choices beside cuDNN, FA3 and FA4
    PYTHONPATH=src python -m benchmarks.hopper short 100     # the host's time; packed sequences; few queries, many keys
    PYTHONPATH=src python -m benchmarks.hopper experiments 470 fa3   # variants, earlier commits, peers; clocks read
    PYTHONPATH=src python -m benchmarks.hopper all 150 fa3   # check, short and clock, the last with what time is left

The number is the budget in seconds. Each writes its rows to $OUT/hopper-<mode>.json and prints a table.
"""
