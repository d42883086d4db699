# Open MPI over UCX, both built with CUDA: gradients are reduced in GPU memory. Source this before `mpirun` or `srun`.
#
#   . launch/env/openmpi-ucx.sh
#   mpirun -n 8 distmlp train run.toml
#
# Wants: `ompi_info --parsable --all | grep mpi_built_with_cuda_support:value` ends in `true`, and
# `ucx_info -d | grep cuda` shows cuda_copy and cuda_ipc. `distmlp doctor` tries it.

export OMPI_MCA_pml=ucx
# Shared memory and the fabric stay; cuda_copy and cuda_ipc are what device pointers need.
export UCX_TLS=${UCX_TLS:-rc,sm,self,cuda_copy,cuda_ipc}
# UCX keeps a cache of which addresses are device memory; CuPy's pools free and reuse addresses behind it.
export UCX_MEMTYPE_CACHE=${UCX_MEMTYPE_CACHE:-n}
# Ctrl-C and SIGTERM to Open MPI's mpirun kill the ranks after half a second. To stop with a checkpoint send
# SIGUSR1 to mpirun instead, or start with launch/mpirun, which does that.
