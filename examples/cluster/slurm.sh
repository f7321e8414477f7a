#!/usr/bin/env bash
# A study on several nodes, which stops in time for its last checkpoints and continues when it is submitted again:
#   sbatch --nodes 4 slurm.sh run kl --preset paper --storage s3://my-bucket/studies --max-hours 23.5
#SBATCH --job-name=tune-study
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --requeue
set -euo pipefail
: "${1:?Type the words of a command after the script, such as: run kl --preset paper --storage s3://my-bucket/studies}"
nodes=($(scontrol show hostnames "$SLURM_JOB_NODELIST"))
head_ip=$(getent ahostsv4 "${nodes[0]}" | awk 'NR == 1 { print $1 }')
# Ray reads the token of ~/.ray/auth_token, which all nodes share. Who has it may run code on the nodes.
export RAY_AUTH_MODE=token
[ -s ~/.ray/auth_token ] || (umask 077 && ray get-auth-token --generate > /dev/null)
# One Ray per node. The command runs on the first one, and Ray ends with it.
exec srun --nodes "$SLURM_JOB_NUM_NODES" ray symmetric-run \
    --address "$head_ip:6379" --min-nodes "$SLURM_JOB_NUM_NODES" -- \
    python -m tune_study "$@" --address auto
