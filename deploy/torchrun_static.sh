#!/usr/bin/env bash
# train_lm on N nodes whose numbers are given, as by a scheduler: one command on every node.
#
#   NODES=4 NODE_RANK=0 MASTER_ADDR=node0 deploy/torchrun_static.sh --preset llama-8b
#
# Nothing has to be agreed on, so that there is little to go wrong; but a node that dies is not
# waited for: let the scheduler start all nodes again (RESTARTS=0), or restart workers in place where
# only processes die.
#
# For a script of your own: TRAIN="my_script.py", as in deploy/own_script.py.
set -euo pipefail
cd "$(dirname "$0")/.."

: "${NODES:?how many nodes there are}" "${NODE_RANK:?which one this is, from 0}"
: "${MASTER_ADDR:?address of node 0}"
MASTER_PORT=${MASTER_PORT:-29500}
RUN=${RUN:-train_lm}
NPROC=${NPROC:-gpu}
RESTARTS=${RESTARTS:-0}
CHECKPOINT=${CHECKPOINT:-runs/$RUN}   # a folder that all nodes see
LOGS=${LOGS:-logs/$RUN}
TRAIN=${TRAIN:--m fsdp2.examples.train_lm}
PYTHON=${PYTHON:-python}

# shellcheck disable=SC2086  # TRAIN is words
exec "$PYTHON" deploy/torchrun.py \
  --nnodes="$NODES" --node-rank="$NODE_RANK" --nproc-per-node="$NPROC" \
  --master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT" --max-restarts="$RESTARTS" \
  --log-dir="$LOGS" --tee=3 \
  $TRAIN --checkpoint "$CHECKPOINT" --resume "$@"
