// RMSNorm over rows of WIDTH, with the residual stream's addition in front of it.
//
//   stream = x + residual;  y = stream / rms(stream) * weight
//
// What is not stored: the normalised row. The backward pass recomputes it from `stream` and one number a row, and returns
// `y` for the gradient of the matrix that follows, so that `y` is not kept from the forward pass.
//
// -DT, -DW: number formats of activations and of the weight. -DWIDTH. -DVEC: neighbours loaded at once; divides WIDTH.
// -DFORWARD_WARPS, -DBACKWARD_WARPS: of a block, at most 32. -DFP8: 1 where the forward pass returns `y` in
// e4m3 with a scale for each row, as fp8.cu would make it of `y`; else 0.
//
// Of the prelude: load and store move VEC neighbours at once, widen and narrow convert them to float and back, and
// block_sum gives every thread the sum over its block.
#include "prelude.cuh"

constexpr int PIECES = WIDTH / VEC;  // of a row
constexpr int FORWARD_ITEMS = (PIECES + FORWARD_WARPS * 32 - 1) / (FORWARD_WARPS * 32);
constexpr bool FORWARD_FULL = PIECES == FORWARD_ITEMS * FORWARD_WARPS * 32;  // no thread is beyond the row's end
constexpr int BACKWARD_ITEMS = (PIECES + BACKWARD_WARPS * 32 - 1) / (BACKWARD_WARPS * 32);

#if FP8
using Y = e4m3;
#else
using Y = T;
#endif

// One block a row. residual and stream may be null, together: then x is the stream. y may be null without FP8.
extern "C" __global__ void __launch_bounds__(FORWARD_WARPS * 32, 1)
rms_norm_forward(const T* __restrict__ x, const T* __restrict__ residual, const W* __restrict__ weight,
                 T* __restrict__ stream, Y* __restrict__ y, float* __restrict__ scales, float* __restrict__ rstd,
                 float eps) {
  const i64 row = blockIdx.x, base = row * WIDTH;
  // All loads of a thread are issued before the first one is waited for.
  constexpr int STEP = FORWARD_WARPS * 32;  // from a thread's vector to its next
  const i64 first = base + (int)threadIdx.x * VEC;
  Vec<T, VEC> h[FORWARD_ITEMS] = {};
#pragma unroll
  for (int i = 0; i < FORWARD_ITEMS; ++i)
    if (FORWARD_FULL || i * STEP + threadIdx.x < PIECES) h[i] = load<VEC>(x + first + i * STEP * VEC);
  if (residual) {
    Vec<T, VEC> b[FORWARD_ITEMS];
#pragma unroll
    for (int i = 0; i < FORWARD_ITEMS; ++i)
      if (FORWARD_FULL || i * STEP + threadIdx.x < PIECES) b[i] = load<VEC>(residual + first + i * STEP * VEC);
#pragma unroll
    for (int i = 0; i < FORWARD_ITEMS; ++i) {
      if (!FORWARD_FULL && i * STEP + threadIdx.x >= PIECES) continue;
#pragma unroll
      for (int j = 0; j < VEC; ++j) narrow(widen(h[i].v[j]) + widen(b[i].v[j]), h[i].v[j]);
      store<VEC>(stream + first + i * STEP * VEC, h[i]);
    }
  }
  float squares = 0.f;
#pragma unroll
  for (int i = 0; i < FORWARD_ITEMS; ++i)
#pragma unroll
    for (int j = 0; j < VEC; ++j) squares += widen(h[i].v[j]) * widen(h[i].v[j]);  // 0 beyond the row's end
  const float scale = rsqrtf(block_sum<FORWARD_WARPS>(squares) * (1.f / WIDTH) + eps);
  if (threadIdx.x == 0) rstd[row] = scale;
#pragma unroll
  for (int i = 0; i < FORWARD_ITEMS; ++i) {
    if (!FORWARD_FULL && i * STEP + threadIdx.x >= PIECES) continue;
    const Vec<W, VEC> w = load<VEC>(weight + (i * STEP + threadIdx.x) * VEC);
#pragma unroll
    for (int j = 0; j < VEC; ++j) narrow(widen(h[i].v[j]) * scale * widen(w.v[j]), h[i].v[j]);
#if !FP8
    if (y) store<VEC>(y + first + i * STEP * VEC, h[i]);
#endif
  }
#if FP8
  quantize_row<FORWARD_WARPS, PIECES>(h, y + base, scales + row);
#endif
}

// With n = stream * rstd and g = dy * weight:  dx = rstd * (g - n * mean(g * n)) + dstream.
// A block walks over rows and keeps its part of the weight's gradient, sum of dy * n, in registers; they are summed
// afterwards in a fixed order. dstream may be null; y too.
extern "C" __global__ void __launch_bounds__(BACKWARD_WARPS * 32, 1)
rms_norm_backward(const T* __restrict__ dy, const T* __restrict__ dstream, const T* __restrict__ stream,
                  const W* __restrict__ weight, const float* __restrict__ rstd, T* __restrict__ dx, T* __restrict__ y,
                  float* __restrict__ partial, i64 rows) {
  float dweight[BACKWARD_ITEMS][VEC] = {};
  for (i64 row = blockIdx.x; row < rows; row += gridDim.x) {
    const i64 base = row * WIDTH;
    const float scale = rstd[row];
    float n[BACKWARD_ITEMS][VEC], g[BACKWARD_ITEMS][VEC];
    Vec<T, VEC> past[BACKWARD_ITEMS] = {};  // dstream, loaded with the rest: after the barriers it would be waited for
    float dot = 0.f;
#pragma unroll
    for (int i = 0; i < BACKWARD_ITEMS; ++i) {
      const int piece = i * BACKWARD_WARPS * 32 + threadIdx.x;
      if (piece >= PIECES) continue;
      const Vec<T, VEC> h = load<VEC>(stream + base + piece * VEC), d = load<VEC>(dy + base + piece * VEC);
      const Vec<W, VEC> w = load<VEC>(weight + piece * VEC);
      if (dstream) past[i] = load<VEC>(dstream + base + piece * VEC);
      Vec<T, VEC> normed;
#pragma unroll
      for (int j = 0; j < VEC; ++j) {
        n[i][j] = widen(h.v[j]) * scale;
        g[i][j] = widen(d.v[j]) * widen(w.v[j]);
        dweight[i][j] += widen(d.v[j]) * n[i][j];
        dot += g[i][j] * n[i][j];
        narrow(n[i][j] * widen(w.v[j]), normed.v[j]);
      }
      if (y) store<VEC>(y + base + piece * VEC, normed);
    }
    dot = block_sum<BACKWARD_WARPS>(dot) * (1.f / WIDTH);
#pragma unroll
    for (int i = 0; i < BACKWARD_ITEMS; ++i) {
      const int piece = i * BACKWARD_WARPS * 32 + threadIdx.x;
      if (piece >= PIECES) continue;
      Vec<T, VEC> out;
#pragma unroll
      for (int j = 0; j < VEC; ++j) narrow(scale * (g[i][j] - n[i][j] * dot) + widen(past[i].v[j]), out.v[j]);
      store<VEC>(dx + base + piece * VEC, out);
    }
  }
#pragma unroll
  for (int i = 0; i < BACKWARD_ITEMS; ++i) {
    const int piece = i * BACKWARD_WARPS * 32 + threadIdx.x;
    if (piece >= PIECES) continue;
#pragma unroll
    for (int j = 0; j < VEC; ++j) partial[(i64)blockIdx.x * WIDTH + piece * VEC + j] = dweight[i][j];
  }
}

extern "C" __global__ void __launch_bounds__(256)
rms_norm_weight(const float* __restrict__ partial, W* __restrict__ dweight, i64 blocks) {
  sum_columns(partial, dweight, WIDTH, blocks);
}
