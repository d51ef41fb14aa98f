"""Memory and time of a step, estimated before a run, without a device.

planner    plan(…) -> Plan: results, other settings, a search for settings that fit, in print
rehearsal  the step itself, run on paper
reasons    why a model cannot be rehearsed, in a sentence
timing     when each operation runs on a machine, also as a timeline
memory     the memory allocated at each moment
hardware   machines, from files in the folder of that name
presets    Llama-like, mixture-of-experts and ViT models of known sizes
calibrate  measures the machine that it runs on

``fsdp2 plan`` plans a preset, or a function of yours; ``fsdp2 calibrate`` measures the machine.
"""

from fsdp2.planning.hardware import Hardware
from fsdp2.planning.memory import Memory, Moment
from fsdp2.planning.planner import Fit, Plan, plan
from fsdp2.planning.rehearsal import Settings
from fsdp2.planning.timing import Times

__all__ = ["Fit", "Hardware", "Memory", "Moment", "Plan", "Settings", "Times", "plan"]
