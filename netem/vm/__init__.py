"""The kernel backend's tests on a kernel that has netem: Debian's cloud kernel under qemu. See README.md."""
