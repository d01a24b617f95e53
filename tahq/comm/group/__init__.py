"""Links inside a site: payloads over gloo or NCCL process groups."""
