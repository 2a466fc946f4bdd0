"""`xgram-dist doctor`: the first hour on a new machine or cluster, as one command.

report.py        rows of the result, their table and the JSON; what the checks share
machine.py       versions, cores, limits, clocks, network interfaces, links, bandwidths
file_system.py   the folder of the runs: rename, fsync, exclusive creation, lease
parity.py        kernels and training steps against the CPU; repetition bit for bit
step_watch.py    host waits, pageable copies and serial scatters of a step
trial.py         a timed run: tokens a second, MFU and seconds by phase, the share of the exchange
run.py           the order of the checks
"""
