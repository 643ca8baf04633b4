"""Device functions (`@triton.jit`) shared by the kernels. Imports only triton."""
