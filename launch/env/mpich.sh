# MPICH built with CUDA (--with-cuda): gradients are reduced in GPU memory. Source this before `mpirun` or `srun`.
#
#   . launch/env/mpich.sh
#   mpirun -n 8 distmlp train run.toml          # in Slurm also: srun --mpi=pmi2 (MPICH with PMIx: --mpi=pmix)
#
# The mpich wheel from PyPI has no CUDA; with it leave this file out. `distmlp doctor` tries it.

export MPIR_CVAR_ENABLE_GPU=1
# mpi4py's wheels hold a build for each ABI: name ours, and the library where the loader does not find it.
export MPI4PY_MPIABI=mpich
