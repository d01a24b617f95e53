"""What builds a network: namespaces with the shapers of the kernel, or with a wire in user space."""
