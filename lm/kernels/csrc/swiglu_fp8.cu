// SwiGLU's forward pass in FP8: (rows, 2 * WIDTH) -> (rows, WIDTH) in e4m3, with a scale for each row.
//
// The numbers are those of swiglu.cu, rounded to T, and then of fp8.cu. What is not stored: z in T.
//
// -DT: number format of gate and up. -DWIDTH. -DVEC: neighbours loaded at once; divides WIDTH. -DWARPS: of a block, at
// most 32. One block a row.
#include "prelude.cuh"

constexpr int PIECES = WIDTH / VEC;  // of a row of z
constexpr int ITEMS = (PIECES + WARPS * 32 - 1) / (WARPS * 32);

extern "C" __global__ void __launch_bounds__(WARPS * 32)
swiglu_fp8(const T* __restrict__ gate_up, e4m3* __restrict__ z, float* __restrict__ scales) {
  const i64 row = blockIdx.x;
  const T* gate = gate_up + row * 2 * WIDTH;
  Vec<T, VEC> g[ITEMS] = {}, u[ITEMS] = {};
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) {
    const int piece = i * WARPS * 32 + threadIdx.x;
    if (piece >= PIECES) continue;
    g[i] = load<VEC>(gate + piece * VEC);
    u[i] = load<VEC>(gate + WIDTH + piece * VEC);
  }
#pragma unroll
  for (int i = 0; i < ITEMS; ++i)
#pragma unroll
    for (int j = 0; j < VEC; ++j)  // zero beyond the row's end
      narrow(swiglu(widen(g[i].v[j]), widen(u[i].v[j])), g[i].v[j]);
  quantize_row<WARPS, PIECES>(g, z + row * WIDTH, scales + row);
}
