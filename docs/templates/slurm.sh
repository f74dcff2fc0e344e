#!/bin/bash
# Trains on several nodes under SLURM: sbatch slurm.sh. The script runs unchanged: it calls splitjax.initialize() before anything
# touches a device, and resumes from its newest checkpoint.
#SBATCH --job-name=train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
# Two minutes before the time is up, and when the job is preempted, every process gets SIGTERM: all save at the same step and exit.
#SBATCH --signal=TERM@120
# The job then goes back into the queue under the same number and into the same log.
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=train-%j.log

set -u

# One process that dies ends the step: the others would wait for it in a collective. SLURM's tasks see each other through JAX's
# cluster detection; each takes the GPU of its local number.
srun --kill-on-bad-exit=1 --label python train.py "$@"
status=$?

# 143: the training script saved because of the SIGTERM, and is not finished. Preempted jobs are requeued by SLURM itself.
if [ "$status" -eq 143 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
