"""What tests share. Import its modules, not lists of names: ``from tests.common import parity``.

Ranks
    workers         real gloo ranks, kept from test to test: ``@ranks(2)``
    preloaded       what each of them imports, once
    thread_ranks    ranks as threads, whose collectives only move tensors
    alone           one rank that goes the ways of many
    backends        kinds of backends, and what stands in for each
    looped          coalesced collectives for a backend without any
    meshes          meshes of more than one dim, and training on them
    parallelisms    ways to spread one model over ranks

Models, parameters and what they do
    models          small models, each built from a seed
    tensors         tensor subclasses with all-gather hooks
    cuts            cuts of parameters, given for short, or random
    running         a small model to run, and what to ask of it meanwhile
    compiling       a model of blocks for ``torch.compile``, and what dynamo counted
    offloading      offload on a CPU mesh
    gradients       gradients of one model from all ranks, and from one process
    observing       what groups do, told as it happens

Comparing
    parity          one model trained in several ways, compared step by step
    combinations    values of arguments: each once by default, then all
    cases           named cases that one test, or one launch, runs one after another
    errors          the catalogue of errors: ``with raises("its-id")``
    page_scripts    whole scripts of pages, and what they print
    upper_bounds    numbers that may only fall, in one table
    totals          how large the repository is: lines by room, words of pages

Schedules on paper
    schedules       small models whose schedules are asserted
    random_models   random module trees, and a watch over what a simulation must never do
    scenarios       what random models go through
    render          a trace, lane by lane

Programs that run by themselves
    jobs            jobs as their users start them, and every process of theirs
"""
