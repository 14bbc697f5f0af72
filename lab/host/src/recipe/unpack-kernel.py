"""Takes the zstd-packed ELF image out of a Debian bzImage: unpack-kernel.py BZIMAGE VMLINUX."""
import subprocess
import sys

image = open(sys.argv[1], "rb").read()
start = image.find(b"\x28\xb5\x2f\xfd", 0x1000)
if start < 0:
    sys.exit(f"{sys.argv[1]}: no zstd payload; the kernel's packing has changed")
# What follows the payload (its length, the rest of the image) is not zstd: the tool says so after the last frame.
unpacked = subprocess.run(["zstd", "-dc"], input=image[start:], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL).stdout
if not unpacked.startswith(b"\x7fELF"):
    sys.exit(f"{sys.argv[1]}: the payload is no ELF image")
open(sys.argv[2], "wb").write(unpacked)
