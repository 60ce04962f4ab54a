#!/bin/sh
# Start one node of an elastic run: the same command on every node, at any time.
#
#   STORE=head:29400 sh examples/torchrun/start.sh
#   STORE=head:29400 sh examples/torchrun/start.sh --trainer.max_epochs 8
#
# STORE is the address of `python examples/torchrun/store.py`: a machine that does not train, so that
# any node may be lost. RUN_DIR is a folder that all nodes share, NODES the maximum number of nodes,
# WORKERS the number of devices per node (equal on all), and ADDRESS the address of this node, if its
# name cannot be resolved.
set -eu
here=$(dirname "$0")

# Each world gets its own store. By default an agent shares one store with all worlds of its workers:
# a joining node finds no address in it, and the others find the address of a lost node.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=${TORCH_DISABLE_SHARE_RDZV_TCP_STORE:-1}

exec "${PYTHON:-python}" -m torch.distributed.run \
    --nnodes="1:${NODES:-4}" \
    --nproc-per-node="${WORKERS:-1}" \
    --max-restarts="${RESTARTS:-100}" \
    --rdzv-backend=c10d \
    --rdzv-endpoint="$STORE" \
    --rdzv-id="${JOB:-elastic}" \
    --rdzv-conf="is_host=0,${RENDEZVOUS:-last_call_timeout=10}" \
    ${ADDRESS:+--local-addr="$ADDRESS"} \
    "$here/../cli.py" fit --config "$here/fit.yaml" "$@"
