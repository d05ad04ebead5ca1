// Queries, keys and values out of the packed projection: RMSNorm over each query and key head (optional), then rotation.
//
//   n = x / rms(x) * weight;  out[i] = n[i] * cos - n[i + D/2] * sin;  out[i + D/2] = n[i + D/2] * cos + n[i] * sin
//
// What is not stored: the normalised heads, and 1/rms, which the backward pass recomputes from the projection; without
// the norm it needs nothing of the forward pass at all.
//
// A head is the work of LANES neighbouring lanes, and the heads of a token lie side by side, so a warp reads and writes
// whole stretches of memory. A lane holds vectors of the first half of a head and their partners in the second.
//
// -DT, -DW: number formats of activations and weights. -DDIM: of a head. -DHEADS, -DKV_HEADS. -DVEC: neighbours loaded
// at once; divides DIM / 2. -DLANES: of a head, a power of two up to 32. -DNORM: 1 if there is one.
#include "prelude.cuh"

constexpr int HALF = DIM / 2, PIECES = HALF / VEC, ALL = HEADS + 2 * KV_HEADS;
constexpr int ITEMS = (PIECES + LANES - 1) / LANES;
constexpr int GROUPS = 256 / LANES;  // heads that a block works on at once

// The sum over the lanes of a head.
__device__ __forceinline__ float head_sum(float x) {
#pragma unroll
  for (int lane = LANES / 2; lane > 0; lane >>= 1) x += __shfl_xor_sync(ALL_LANES, x, lane);
  return x;
}

// Both halves of a head's vectors, in fp32; zeros where a lane has none.
struct Head { float a[ITEMS][VEC], b[ITEMS][VEC]; };

__device__ __forceinline__ Head read(const T* p, bool active) {
  Head x = {};
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) {
    const int piece = i * LANES + threadIdx.x % LANES;
    if (!active || piece >= PIECES) continue;
    const Vec<T, VEC> a = load<VEC>(p + piece * VEC), b = load<VEC>(p + HALF + piece * VEC);
#pragma unroll
    for (int j = 0; j < VEC; ++j) {
      x.a[i][j] = widen(a.v[j]);
      x.b[i][j] = widen(b.v[j]);
    }
  }
  return x;
}

__device__ __forceinline__ void write(T* p, const Head& x) {
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) {
    const int piece = i * LANES + threadIdx.x % LANES;
    if (piece >= PIECES) continue;
    Vec<T, VEC> a, b;
#pragma unroll
    for (int j = 0; j < VEC; ++j) {
      narrow(x.a[i][j], a.v[j]);
      narrow(x.b[i][j], b.v[j]);
    }
    store<VEC>(p + piece * VEC, a);
    store<VEC>(p + HALF + piece * VEC, b);
  }
}

// Turn a head by its position's angles, or back.
__device__ __forceinline__ void turn(Head& x, const float* cos, const float* sin, i64 position, float direction) {
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) {
    const int piece = i * LANES + threadIdx.x % LANES;
    if (piece >= PIECES) continue;
    const Vec<float, VEC> c = load<VEC>(cos + position * HALF + piece * VEC);
    const Vec<float, VEC> s = load<VEC>(sin + position * HALF + piece * VEC);
#pragma unroll
    for (int j = 0; j < VEC; ++j) {
      const float a = x.a[i][j], b = x.b[i][j], turned = direction * s.v[j];
      x.a[i][j] = a * c.v[j] - b * turned;
      x.b[i][j] = b * c.v[j] + a * turned;
    }
  }
}

__device__ __forceinline__ Head weights(const W* weight) {
  Head w = {};
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) {
    const int piece = i * LANES + threadIdx.x % LANES;
    if (piece >= PIECES) continue;
    const Vec<W, VEC> a = load<VEC>(weight + piece * VEC), b = load<VEC>(weight + HALF + piece * VEC);
#pragma unroll
    for (int j = 0; j < VEC; ++j) {
      w.a[i][j] = widen(a.v[j]);
      w.b[i][j] = widen(b.v[j]);
    }
  }
  return w;
}

__device__ __forceinline__ float product(const Head& x, const Head& y) {
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < ITEMS; ++i)
#pragma unroll
    for (int j = 0; j < VEC; ++j) sum += x.a[i][j] * y.a[i][j] + x.b[i][j] * y.b[i][j];
  return head_sum(sum);
}

// positions may be null: then a token's position is its place in its row of `length` tokens.
__device__ __forceinline__ i64 position_of(const int* positions, i64 token, i64 length) {
  return positions ? positions[token] : (unsigned)token % (unsigned)length;
}

extern "C" __global__ void __launch_bounds__(256, 1)
qk_norm_rope_forward(const T* __restrict__ qkv, const W* __restrict__ q_weight, const W* __restrict__ k_weight,
                     const float* __restrict__ cos, const float* __restrict__ sin, const int* __restrict__ positions,
                     T* __restrict__ q, T* __restrict__ k, T* __restrict__ v, i64 tokens, i64 length, float eps) {
  const i64 number = (i64)blockIdx.x * GROUPS + threadIdx.x / LANES, token = number / ALL;
  const int head = number % ALL;
  const bool active = token < tokens;
  Head x = read(qkv + number * DIM, active);
  const bool turned = head < HEADS + KV_HEADS;
  if (NORM) {  // every lane of the warp takes part in the sum, also those of values and of no head
    const float scale = rsqrtf(product(x, x) * (1.f / DIM) + eps);
    if (turned) {
      const Head w = weights(head < HEADS ? q_weight : k_weight);
#pragma unroll
      for (int i = 0; i < ITEMS; ++i)
#pragma unroll
        for (int j = 0; j < VEC; ++j) {
          x.a[i][j] *= scale * w.a[i][j];
          x.b[i][j] *= scale * w.b[i][j];
        }
    }
  }
  if (!active) return;
  if (turned) turn(x, cos, sin, position_of(positions, token, length), 1.f);
  if (head < HEADS) write(q + (token * HEADS + head) * DIM, x);
  else if (turned) write(k + (token * KV_HEADS + head - HEADS) * DIM, x);
  else write(v + (token * KV_HEADS + head - HEADS - KV_HEADS) * DIM, x);
}

// With n = x * rstd and g the gradient of n * weight, turned back:
//   dx = rstd * (g * weight - n * mean(g * weight * n)),  dweight = sum of g * n.
// Gradients come with the strides of a batch, a token and a head. A block walks over heads and keeps its part of the
// weights' gradients, first the queries', then the keys'; they are summed afterwards in a fixed order.
extern "C" __global__ void __launch_bounds__(256, 1)
qk_norm_rope_backward(const T* __restrict__ dq, i64 qb, i64 qt, i64 qh, const T* __restrict__ dk, i64 kb, i64 kt, i64 kh,
                      const T* __restrict__ dv, i64 vb, i64 vt, i64 vh, const T* __restrict__ qkv,
                      const W* __restrict__ q_weight, const W* __restrict__ k_weight, const float* __restrict__ cos,
                      const float* __restrict__ sin, const int* __restrict__ positions, T* __restrict__ dqkv,
                      float* __restrict__ partial, i64 tokens, i64 length, float eps) {
  Head dweight[2] = {};
  const i64 heads = tokens * ALL, rounds = (heads + GROUPS - 1) / GROUPS;
  for (i64 round = blockIdx.x; round < rounds; round += gridDim.x) {
    const i64 number = round * GROUPS + threadIdx.x / LANES, token = number / ALL;
    const int head = number % ALL;
    const bool active = number < heads;
    const i64 row = (unsigned)token / (unsigned)length, time = (unsigned)token % (unsigned)length;
    const bool turned = head < HEADS + KV_HEADS, query = head < HEADS;
    const T* gradient = query    ? dq + row * qb + time * qt + head * qh
                        : turned ? dk + row * kb + time * kt + (head - HEADS) * kh
                                 : dv + row * vb + time * vt + (head - HEADS - KV_HEADS) * vh;
    Head g = read(gradient, active);
    if (active && turned) turn(g, cos, sin, position_of(positions, token, length), -1.f);
    if (NORM) {
      Head n = read(qkv + number * DIM, active && turned);
      const float scale = rsqrtf(product(n, n) * (1.f / DIM) + eps);
      const Head w = weights(query ? q_weight : k_weight);
#pragma unroll
      for (int i = 0; i < ITEMS; ++i)
#pragma unroll
        for (int j = 0; j < VEC; ++j) {
          n.a[i][j] *= scale;
          n.b[i][j] *= scale;
          const float a = active && turned ? g.a[i][j] * n.a[i][j] : 0.f;
          const float b = active && turned ? g.b[i][j] * n.b[i][j] : 0.f;
          dweight[0].a[i][j] += query ? a : 0.f;
          dweight[0].b[i][j] += query ? b : 0.f;
          dweight[1].a[i][j] += query ? 0.f : a;
          dweight[1].b[i][j] += query ? 0.f : b;
          if (turned) {
            g.a[i][j] *= w.a[i][j];
            g.b[i][j] *= w.b[i][j];
          }
        }
      const float mean = product(g, n) * (1.f / DIM);
      if (turned) {
#pragma unroll
        for (int i = 0; i < ITEMS; ++i)
#pragma unroll
          for (int j = 0; j < VEC; ++j) {
            g.a[i][j] = scale * (g.a[i][j] - n.a[i][j] * mean);
            g.b[i][j] = scale * (g.b[i][j] - n.b[i][j] * mean);
          }
      }
    }
    if (active) write(dqkv + number * DIM, g);
  }
  if (NORM) {
    __shared__ float sums[GROUPS][DIM];
#pragma unroll
    for (int which = 0; which < 2; ++which) {
#pragma unroll
      for (int i = 0; i < ITEMS; ++i) {
        const int piece = i * LANES + threadIdx.x % LANES;
        if (piece >= PIECES) continue;
#pragma unroll
        for (int j = 0; j < VEC; ++j) {
          sums[threadIdx.x / LANES][piece * VEC + j] = dweight[which].a[i][j];
          sums[threadIdx.x / LANES][HALF + piece * VEC + j] = dweight[which].b[i][j];
        }
      }
      __syncthreads();  // every group has written its sums
      for (int column = threadIdx.x; column < DIM; column += 256) {
        float sum = 0.f;
        for (int group = 0; group < GROUPS; ++group) sum += sums[group][column];
        partial[((i64)blockIdx.x * 2 + which) * DIM + column] = sum;
      }
      __syncthreads();  // they have been read, the keys' sums may take their place
    }
  }
}

extern "C" __global__ void __launch_bounds__(256)
qk_norm_rope_weights(const float* __restrict__ partial, W* __restrict__ dweights, i64 blocks) {
  sum_columns(partial, dweights, 2 * DIM, blocks);
}
