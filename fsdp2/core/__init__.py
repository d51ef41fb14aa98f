"""How fsdp2 works, in eight rooms on a ground floor; each imports only those before it.

custom_collectives  the user's own collectives: what they have to be
config              what a user may choose, as frozen values
errors              the exceptions, and the code of each message
progress            optimizer steps counted; what to say where a collective fails
names               names without what wrappers put into them
pieces              lengths cut into equal pieces, and rounded up
notices             what rooms above core are told of, at rare events
codecs/             numbers in fewer bytes: what travels in place of parameters and gradients
device/             lanes, memory, kernels and collectives of one device
layout/             where every element lives: flat layouts, meshes
params/             a parameter in its forms, and its gradients
gather/             from shards to gathered parameters
reduce/             from full gradients to sharded ``.grad``
schedule/           when groups of parameters are gathered, freed and reduced
modules/            nn.Module and autograd: what drives the schedule
"""
