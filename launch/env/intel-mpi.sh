# Intel MPI with CUDA, on one host, from a oneAPI installation or `pip install distmlp[impi]`. Source this before
# `mpirun` or `mpiexec.hydra`.
#
#   . launch/env/intel-mpi.sh
#   mpiexec.hydra -n 2 distmlp train run.toml
#
# Without a GPU I_MPI_OFFLOAD=1 is a segmentation fault in MPI_Init, so it is set only where the driver is there. With
# it every rank opens every GPU that it sees and keeps about 1 GB on each; `I_MPI_OFFLOAD=0` after this leaves that out
# where MPI does not move GPU memory (run.transport = "peer", "nccl" or "staged").

_distmlp_library=$(ldconfig -p 2>/dev/null | awk '/libcuda\.so\.1 .*x86-64/ { print $NF; exit }')
if [ -n "$_distmlp_library" ] && [ -e /dev/nvidiactl ]; then
  export I_MPI_OFFLOAD=1
  export I_MPI_OFFLOAD_CUDA_LIBRARY=$_distmlp_library   # its default, libcuda.so, is often missing
else
  echo "launch/env/intel-mpi.sh: no NVIDIA driver here, device support stays off" >&2
fi
unset _distmlp_library
export I_MPI_HYDRA_BOOTSTRAP=${I_MPI_HYDRA_BOOTSTRAP:-fork}   # one host; for several: ssh or slurm
export I_MPI_FABRICS=${I_MPI_FABRICS:-shm}                    # one host; for several: shm:ofi

# The library of a virtual environment is not on the loader's path.
if [ -n "${VIRTUAL_ENV:-}" ] && [ -e "$VIRTUAL_ENV/lib/libmpi.so.12" ]; then
  export MPI4PY_MPIABI=mpich MPI4PY_LIBMPI=$VIRTUAL_ENV/lib/libmpi.so.12
  export I_MPI_ROOT=${I_MPI_ROOT:-$VIRTUAL_ENV}   # where it finds the GPU's reductions, opt/mpi/etc/coll.fatbin
fi
