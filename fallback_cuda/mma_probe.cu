// Four independent 8x8x4 products by one warp, one per quadpair, with FP32 accumulation.
//   C[q] = A[q] @ B[q]^T     A, B: [4][8][4] half (k contiguous), C: [4][8][8] float
// Proves that the compiler knows m8n8k4 for the target and that the fragment map is the one in the PTX ISA
// ("Matrix Fragments for mma.m8n8k4"): quadpair q is lanes 4q..4q+3 and 16+4q..16+4q+3.
#include <cuda_fp16.h>

extern "C" __global__ void __launch_bounds__(32) mma_probe(const __half* A, const __half* B, float* C) {
    const int lane = threadIdx.x;
    const int quadpair = (lane >> 2) & 3;
    const int row = (lane & 3) + (lane & 16 ? 4 : 0);
    const uint2 a = reinterpret_cast<const uint2*>(A)[quadpair * 8 + row];
    const uint2 b = reinterpret_cast<const uint2*>(B)[quadpair * 8 + row];
    float c[8] = {0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f};
    asm volatile(
        "mma.sync.aligned.m8n8k4.row.col.f32.f16.f16.f32 {%0,%1,%2,%3,%4,%5,%6,%7}, {%8,%9}, {%10,%11}, {%0,%1,%2,%3,%4,%5,%6,%7};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7])
        : "r"(a.x), "r"(a.y), "r"(b.x), "r"(b.y));
    for (int i = 0; i < 8; ++i) {
        const int m = (lane & 1) + (i & 2) + (lane & 16 ? 4 : 0);
        const int n = (lane & 2) + (i & 1) + (i & 4);
        C[(quadpair * 8 + m) * 8 + n] = c[i];
    }
}
