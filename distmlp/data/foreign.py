"""Files that are called .h5 and are something else: what they are, by their first bytes, and what to do."""

from __future__ import annotations

_KINDS = (  # first bytes, what they mean
    (b"\x1f\x8b", "is compressed with gzip; unpack it first (gunzip)"),
    (b"BZh", "is compressed with bzip2; unpack it first (bunzip2)"),
    (b"\xfd7zXZ\0", "is compressed with xz; unpack it first (unxz)"),
    (b"\x28\xb5\x2f\xfd", "is compressed with zstd; unpack it first (unzstd)"),
    (b"PK\x03\x04", "is a ZIP archive or an NPZ file; unpack it, or name it .npz and use `distmlp data convert`"),
    (b"\x93NUMPY", "is an NPY file; name it .npy and use `distmlp data convert`"),
    (b"PAR1\x15", "is a Parquet file; name it .parquet and use `distmlp data convert`"),
    (b"CDF\x01", "is a netCDF-3 file; make it netCDF-4, which is HDF5: nccopy -k nc4 IN OUT"),
    (b"CDF\x02", "is a netCDF-3 file; make it netCDF-4, which is HDF5: nccopy -k nc4 IN OUT"),
    (b"CDF\x05", "is a netCDF-3 file; make it netCDF-4, which is HDF5: nccopy -k nc4 IN OUT"),
    (b"\x0e\x03\x13\x01", "is an HDF4 file, which is another format; convert it with h4toh5 or nccopy"),
    (b"MATLAB 5.0", "is a MAT-file before version 7.3; save it again in MATLAB with -v7.3, which is HDF5"),
    (b"version https://git-lfs", "is a pointer of Git LFS, not the data; run `git lfs pull`"),
    (b"/annex/objects/", "is a pointer of git-annex, not the data; run `git annex get`"),
    (b"<!doctype html", "is a web page, perhaps what a download gave instead of the file; fetch it again"),
    (b"<html", "is a web page, perhaps what a download gave instead of the file; fetch it again"),
    (b"<?xml", "is an XML text, perhaps what a download gave instead of the file; fetch it again"),
)
HEAD_BYTES = 512


def recognized(head: bytes) -> str:
    """What a file without HDF5's signature is, by its first bytes, or ""."""
    if head and not head.strip(b"\0"):
        return "begins with zeros where HDF5's signature should be: a copy or a disk lost them; copy or make it again"
    start = head.lstrip().lower()
    for magic, text in _KINDS:
        if head.startswith(magic) or (magic.startswith(b"<") and start.startswith(magic)):
            return f"is not an HDF5 file: it {text}"
    return ""


def member_of_several(head: bytes) -> str:
    """Why the superblock `head` belongs to a file that HDF5's drivers have cut into several, or ""."""
    if b"NCSAfami" in head:
        return "is one of a family of files (HDF5's family driver); join them: h5repart 'NAME-%05d.h5' ONE.h5"
    if b"NCSAmult" in head:
        return "is one of several files (HDF5's multi driver); make one of them: h5repack"
    return ""
