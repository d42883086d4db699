# What launch/quickstart, launch/test and CI share: the virtual environment beside the project, an MPI that works in it,
# and the MPI test suite. Sourced by bash, not run.
#
# Variables, all optional:
#   PYTHON         the Python (3.11 or newer) to build the environment with
#   DISTMLP_VENV   where the environment goes; default .venv beside the project
#   DISTMLP_MPI    auto (what is on PATH if it works, else mpich), system, mpich, openmpi or impi
#   DISTMLP_REPORTS  directory for the test suites' JUnit files

project=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
venv=${DISTMLP_VENV:-$project/.venv}
last_output=   # of the last command run by `quietly`
unset PYTHONHOME PYTHONPATH   # other programs' modules would hide what is installed in the environment

say() { printf '%s\n' "$*"; }

fail() {
  printf '\n%s\n' "$*" >&2
  exit 1
}

# quietly COMMAND…: shows what it printed only when it fails.
quietly() {
  last_output=$("$@" 2>&1 </dev/null) || {
    tail -n 25 <<<"$last_output" >&2
    return 1
  }
}

can_apt() { [[ $(id -u) -eq 0 ]] && command -v apt-get >/dev/null; }

apt_install() {
  export DEBIAN_FRONTEND=noninteractive
  quietly apt-get install -y --no-install-recommends "$@" ||
    { quietly apt-get update && quietly apt-get install -y --no-install-recommends "$@"; }
}

_python_fits() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

_find_python() {
  local candidate
  for candidate in ${PYTHON:+"$PYTHON"} python3 python3.14 python3.13 python3.12 python3.11 python; do
    if command -v "$candidate" >/dev/null && _python_fits "$candidate"; then
      command -v "$candidate"
      return
    fi
  done
  return 1
}

# make_venv: afterwards $venv/bin is first on PATH and has pip. An environment that is there is kept, unless it cannot run
# or was made by this script and then moved: it knows its own path.
make_venv() {
  local python made_at
  made_at=$(head -n 1 "$venv/.distmlp" 2>/dev/null) || made_at=$venv
  if [[ $made_at != "$venv" ]] || ! _python_fits "$venv/bin/python"; then
    python=$(_find_python) || fail "distmlp needs Python 3.11 or newer, and none was found on PATH. Install one" \
      "(Debian 12, Ubuntu 24.04 or newer: apt-get install python3 python3-venv) or name one: PYTHON=/path/to/python3 $0"
    if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
      if can_apt; then
        say "Installing python3-venv ..."
        apt_install python3-venv || fail "apt-get could not install python3-venv; its last lines stand above."
      else
        fail "$python cannot make virtual environments. Install that part: sudo apt-get install python3-venv"
      fi
    fi
    say "Making the virtual environment $venv ..."
    quietly "$python" -m venv --clear "$venv" || fail "could not make the virtual environment $venv"
  fi
  [[ -s $venv/.distmlp ]] || say "$venv" >"$venv/.distmlp"
  export VIRTUAL_ENV=$venv PATH="$venv/bin:$PATH" PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
}

# install EXTRA…: the project, editable, with these extras; nothing when that has been done since pyproject.toml changed.
install() {
  local sum done_before extras
  sum=$(sha256sum <"$project/pyproject.toml")
  sum=${sum%% *}
  done_before=$(sed -n 2p "$venv/.distmlp")   # checksum, then the extras
  extras=$(tr ' ' '\n' <<<"${done_before#* } $*" | sort -u | xargs | tr ' ' ',')
  [[ $done_before == "$sum ${extras//,/ }" ]] && return
  local what=${extras:+[$extras]}
  say "Installing distmlp$what into $venv ..."
  quietly python -m pip install --quiet --no-compile --editable "$project$what" ||
    fail "pip could not install distmlp$what; its last lines stand above. Is a package registry reachable?"
  printf '%s\n%s\n' "$venv" "$sum ${extras//,/ }" >"$venv/.distmlp"
}

_installed() { sed -n 2p "$venv/.distmlp" | grep -qw -- "$1"; }

_mpi_works() {
  command -v mpirun >/dev/null || { last_output="no mpirun on PATH" && return 1; }
  last_output=$(timeout 60 mpirun -n 2 python -c \
    'from mpi4py import MPI; raise SystemExit(MPI.COMM_WORLD.size != 2)' 2>&1 </dev/null)
}

# choose_mpi: afterwards `mpirun -n N` starts N ranks on this machine, as any user, however few cores there are.
choose_mpi() {
  export HYDRA_LAUNCHER=fork I_MPI_HYDRA_BOOTSTRAP=fork
  export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
  export OMPI_MCA_rmaps_base_oversubscribe=1 OMPI_MCA_hwloc_base_binding_policy=none                          # 4
  export PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe PRTE_MCA_hwloc_default_binding_policy=none     # 5
  case ${DISTMLP_MPI:-auto} in
    auto) _installed mpich || _installed openmpi || _installed impi || _mpi_works || install mpich ;;
    system) ;;
    mpich | openmpi | impi) install "$DISTMLP_MPI" ;;
    *) fail "DISTMLP_MPI=$DISTMLP_MPI: expected auto, system, mpich, openmpi or impi" ;;
  esac
  _mpi_works || {
    tail -n 25 <<<"$last_output" >&2
    fail "mpirun on PATH ($(command -v mpirun)) does not start 2 ranks of one job with mpi4py's MPI library" \
      "($(python -m mpi4py --mpi-library 2>/dev/null)): use launcher and library of one make, or DISTMLP_MPI=mpich $0"
  }
}

# mpi_suite RANKS [argument of pytest]…: the tests marked `mpi`, as RANKS ranks. Rank 0 is shown as it goes, the others
# when something failed. Fails too where a rank ran no test: unasked, pytest-mpi skips everything and is green.
mpi_suite() {
  local ranks=$1 reports code=0 rank
  shift
  reports=${DISTMLP_REPORTS:-$(mktemp -d)}/mpi-$ranks
  mkdir -p "$reports"
  rm -f "$reports"/rank-*
  local files   # the others need not even be imported
  mapfile -t files < <(grep -rlE 'mark\.mpi\b' "$project/tests" --include='test_*.py')
  # shellcheck disable=SC2016
  timeout 900 mpirun -n "$ranks" sh -c '
    rank=${PMI_RANK:-${OMPI_COMM_WORLD_RANK:?no launcher known to launch/setup.sh}} reports=$0
    [ "$rank" = 0 ] || exec >"$reports/rank-$rank.log" 2>&1
    exec python -m pytest -m mpi --with-mpi --timeout=60 --timeout-method=thread -p no:cacheprovider \
      --junitxml="$reports/rank-$rank.xml" "$@"' "$reports" "${files[@]}" "$@" </dev/null || code=$?
  for ((rank = 0; rank < ranks; rank++)); do
    python "$project/tests/count_run.py" "$reports/rank-$rank.xml" >/dev/null || code=1
  done
  if [[ $code -ne 0 ]]; then
    for ((rank = 1; rank < ranks; rank++)); do
      say "---- rank $rank of $ranks"
      tail -n 60 "$reports/rank-$rank.log"
    done
    say "the MPI suite on $ranks ranks failed ($code)" >&2
    return 1
  fi
}
