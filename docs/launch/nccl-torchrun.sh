#!/usr/bin/env bash
# zeropp over NCCL with torchrun: a process for each GPU. To be started on each node, with its number
# from 0, the name of node 0, and more words for zeropp behind those that stand here; ZEROPP_TOKEN is
# the same on all of them (openssl rand -hex 32):
#
#   ZEROPP_TOKEN=… ./nccl-torchrun.sh 0 node0 run --pp 2 --zero3 8 --device cuda --data book.txt
set -euo pipefail

node_rank=${1:?the number of this node, from 0}
first=${2:?the name of node 0}
shift 2
: "${ZEROPP_TOKEN:?the same secret on all nodes, such as openssl rand -hex 32 prints}"
export ZEROPP_TOKEN

# zeropp built with --features cuda.
zeropp=${ZEROPP:-zeropp}

# Cards register memory for RDMA, which a limit on locked memory refuses.
ulimit -l unlimited || echo "ulimit -l: $(ulimit -l) KiB of locked memory may be too little for RDMA" >&2
# NCCL says what goes wrong. Where it takes the wrong cards, name yours: NCCL_IB_HCA=mlx5 for RDMA,
# NCCL_SOCKET_IFNAME=eth0 for what it says over TCP.
export NCCL_DEBUG=${NCCL_DEBUG:-WARN}

exec torchrun --nnodes 2 --node-rank "$node_rank" --nproc-per-node 8 \
    --master-addr "$first" --master-port 29500 --no-python \
    "$zeropp" "$@" --engine nccl
