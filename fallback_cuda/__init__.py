"""CUDA C++ kernels, compiled at run time by CuPy and NVRTC, for what Triton cannot express well on Volta. Imports nothing from sm70_triton."""
