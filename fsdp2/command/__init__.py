"""The command ``fsdp2``, also ``python -m fsdp2``: all work outside of a training script.

main        finds the subcommand, and imports only its module
options     one parser for all: options, complaints, exit codes
output      tables, colours, JSON, and the progress line on stderr
plan        `fsdp2 plan`: memory and time of a step, planned
calibrate   `fsdp2 calibrate`: this machine, measured for plans
trace       `fsdp2 trace`: timelines as a page, as tables, side by side
checkpoint  `fsdp2 checkpoint`: folders of steps, listed, checked, exported, converted, removed
run         `fsdp2 run`: a script written for torch's FSDP, on fsdp2
doctor      `fsdp2 doctor`: versions, backends, and what a first step does here
selftest    that first step: ranks train a tiny model, sharded and not, and compare
examples    `fsdp2 examples`: their list, and a way to start one

This is the top room: it may import all others, and nothing imports it. No module here imports torch
before its arguments are read, so that every ``--help`` is there at once; tests/command measures it.
"""
