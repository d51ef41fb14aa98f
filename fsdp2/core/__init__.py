"""The engine of fsdp2: eight rooms and some modules; each imports only those before it.

custom_collectives  the user's own collectives: their interface
config              the user's choices, as frozen values
errors              the exceptions, and the code of each message
progress            counts of this process; the message for a failed collective
names               names without the prefixes of wrappers
pieces              lengths split into equal pieces, and rounded up
notices             notifications to rooms above core, at rare events
codecs/             encoded messages with fewer bytes for parameters and gradients
device/             lanes, memory, kernels and collectives of one device
layout/             the position of every element: flat layouts, meshes
params/             a parameter in its forms, and its gradients
gather/             from shards to unsharded parameters
reduce/             from unsharded gradients to sharded ``.grad``
schedule/           when groups of parameters are unsharded, resharded and reduced
modules/            nn.Module and autograd: they drive the schedule
facts               the names of all these that rooms above core may import
"""
