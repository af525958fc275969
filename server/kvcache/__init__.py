"""The paged cache with three lanes: page ids, hashes and reference counts on one side, the pools' tensors on the other."""
