#!/usr/bin/env bash
# train_lm on N nodes that find each other: the same command on every node, in any order.
#
#   NODES=4 HEAD=node0:29400 RUN=7b deploy/torchrun_c10d.sh --preset llama-8b --precision bf16
#
# A worker that dies, or a node, costs the steps since the last checkpoint: the agents of the other
# nodes end their workers and wait until NODES nodes are there, a new one or the old one again. The
# node of HEAD has the store of the rendezvous: if it dies, all end, and all have to be started again.
#
# For a script of your own: TRAIN="my_script.py" (deploy/own_script.py is one); what it has to do
# itself is marked there.
set -euo pipefail
cd "$(dirname "$0")/.."

: "${NODES:?how many nodes there are}" "${HEAD:?host:port of one of them, the same on all}"
RUN=${RUN:-train_lm}                  # a name that no other run has
NPROC=${NPROC:-gpu}                   # ranks of a node: one per GPU; a number on a machine without
RESTARTS=${RESTARTS:-3}               # how often workers are started again
CHECKPOINT=${CHECKPOINT:-runs/$RUN}   # a folder that all nodes see
LOGS=${LOGS:-logs/$RUN}               # of this node: a file per rank and attempt
TRAIN=${TRAIN:--m fsdp2.examples.train_lm}
PYTHON=${PYTHON:-python}

# Heartbeats, 5 seconds apart, without which an agent is taken for dead. Agents write the times of
# their own clocks: a node whose clock is further behind than that is left out of the run, without a
# word. With MISSED=20 it may be 100 seconds behind; but then a dead node is missed as late.
MISSED=${MISSED:-3}

options=()
# The address under which others reach this node, where its host name does not resolve.
[ -z "${ADDRESS:-}" ] || options+=("--local-addr=$ADDRESS")
# Whether this node has the store; by default the one whose host name HEAD has.
conf=keep_alive_max_attempt=$MISSED
[ -z "${IS_HOST:-}" ] || conf+=,is_host=$IS_HOST

# Workers of several nodes that are started again must not read what dead ones have left in the
# agents' store (https://github.com/pytorch/pytorch/issues/135712).
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

# Shards over all ranks. Or inside a node, with copies between nodes: add --replicate "$NODES" where
# this says that it is faster (a slow network between nodes) and that it fits:
#   python -m fsdp2.examples.train_lm --plan h100 --nproc 32 --replicate 4 --preset llama-8b …
# shellcheck disable=SC2086  # TRAIN is words
exec "$PYTHON" deploy/torchrun.py \
  --nnodes="$NODES" --nproc-per-node="$NPROC" --max-restarts="$RESTARTS" \
  --rdzv-backend=c10d --rdzv-endpoint="$HEAD" --rdzv-id="$RUN" --rdzv-conf="$conf" \
  "${options[@]}" \
  --log-dir="$LOGS" --tee=3 \
  $TRAIN --checkpoint "$CHECKPOINT" --resume "$@"
