"""Programs that were written for torch's FSDP run on fsdp2, unchanged.

__main__    ``python -m fsdp2.run``, which is ``fsdp2 run``: installs, then runs a script
installing  `fsdp2.install`, `fsdp2.uninstall`: torch's names, replaced and restored
startup     child processes of an installed one install, too

`installing` imports everything that it installs.
"""
