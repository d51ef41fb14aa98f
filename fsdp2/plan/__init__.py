"""See before you run: what a step takes of memory and time, without a device.

planner    plan(…) -> Plan: results, other settings, a search for what fits
rehearsal  the step itself, run on paper
timing     when each operation runs on a machine
memory     what is allocated at each moment
hardware   machines, from files in the folder of that name
presets    Llama-like, mixture-of-experts and ViT models of known sizes
calibrate  measures the machine that it runs on
printing   tables, and settings as code
picture    a plan as a timeline

``python -m fsdp2.plan`` plans a preset, or a function of yours.
"""

from fsdp2.plan.hardware import Hardware
from fsdp2.plan.memory import Memory, Moment
from fsdp2.plan.planner import Fit, Plan, plan
from fsdp2.plan.rehearsal import Settings
from fsdp2.plan.timing import Times, UnitTimes

__all__ = ["Fit", "Hardware", "Memory", "Moment", "Plan", "Settings", "Times", "UnitTimes", "plan"]
