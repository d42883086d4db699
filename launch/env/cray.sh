# Cray MPICH with CUDA. Source this before `srun` (Slurm) or `mpiexec` (PALS).
#
#   . launch/env/cray.sh
#   srun -n 8 --gpus-per-task=1 distmlp train run.toml
#
# Load the accelerator's module first (craype-accel-nvidia80, craype-accel-nvidia90). Python is not linked against the
# GPU transport layer (GTL), without which Cray MPICH ends in MPI_Init with "GPU_SUPPORT_ENABLED is requested, but
# GTL library is not linked": it is preloaded here. mpi4py must be built against Cray MPICH:
#   MPICC="cc -shared" pip install --no-binary mpi4py mpi4py

export MPICH_GPU_SUPPORT_ENABLED=1
_distmlp_gtl=${PE_MPICH_GTL_DIR_nvidia90:-${PE_MPICH_GTL_DIR_nvidia80:-${CRAY_MPICH_ROOTDIR:-/opt/cray/pe/mpich/default}/gtl/lib}}
_distmlp_gtl=${_distmlp_gtl#-L}/libmpi_gtl_cuda.so
if [ -e "$_distmlp_gtl" ]; then
  export LD_PRELOAD=$_distmlp_gtl${LD_PRELOAD:+:$LD_PRELOAD}
else
  echo "launch/env/cray.sh: $_distmlp_gtl is missing; load the craype-accel module of your GPUs" >&2
fi
unset _distmlp_gtl
# Sums in an order that does not depend on where ranks are placed.
export MPICH_ALLREDUCE_NO_SMP=1 MPICH_REDUCE_NO_SMP=1
