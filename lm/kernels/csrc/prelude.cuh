// What every kernel here starts from: number formats, 16-byte vectors, sums over a warp and over a block.
//
// No header of CUDA is included, so nothing but NVRTC itself has to be installed, and a file compiles in a few hundredths
// of a second. The conversions are single instructions of the hardware. All arithmetic is fp32; T is only how numbers lie
// in memory. Rows are described by compile-time constants, because a loop of known length is unrolled and its values stay
// in registers.
#pragma once

typedef long long i64;

#ifdef EMULATED
#include "cuda_on_cpu.h"  // test equipment: the same kernels on a CPU
#else
struct bf16 { unsigned short bits; };
struct fp16 { unsigned short bits; };
__device__ __forceinline__ float widen(bf16 x) { return __uint_as_float((unsigned)x.bits << 16); }
__device__ __forceinline__ float widen(fp16 x) {
  float f;
  asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(x.bits));
  return f;
}
__device__ __forceinline__ void narrow(float f, bf16& x) { asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(x.bits) : "f"(f)); }
__device__ __forceinline__ void narrow(float f, fp16& x) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(x.bits) : "f"(f)); }

// FP8, from sm_89 on. Two numbers are narrowed at once; `low` is the first of the two in memory.
struct e4m3 { unsigned char bits; };
struct e5m2 { unsigned char bits; };
template <typename F> __device__ __forceinline__ unsigned narrow_two(float low, float high);
template <> __device__ __forceinline__ unsigned narrow_two<e4m3>(float low, float high) {
  unsigned short two;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %2, %1;" : "=h"(two) : "f"(low), "f"(high));
  return two;
}
template <> __device__ __forceinline__ unsigned narrow_two<e5m2>(float low, float high) {
  unsigned short two;
  asm("cvt.rn.satfinite.e5m2x2.f32 %0, %2, %1;" : "=h"(two) : "f"(low), "f"(high));
  return two;
}
#define CHECK_ALIGNED(p, bytes)
#endif
__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ void narrow(float f, float& x) { x = f; }

// N neighbours that are loaded and stored at once, 16 bytes an instruction where alignment allows, else N is 1.
template <typename S, int N> struct alignas(sizeof(S) * N < 16 ? sizeof(S) * N : 16) Vec { S v[N]; };
template <int N, typename S> __device__ __forceinline__ Vec<S, N> load(const S* p) {
  CHECK_ALIGNED(p, alignof(Vec<S, N>));
  return *reinterpret_cast<const Vec<S, N>*>(p);
}
// To memory of the device, not to shared memory.
template <int N, typename S> __device__ __forceinline__ void store(S* p, const Vec<S, N>& x) {
  CHECK_ALIGNED(p, alignof(Vec<S, N>));
#ifndef EMULATED
  if constexpr (sizeof(x) == 16 && sizeof(S) == 2) {  // of which the compiler makes three stores now and then
    const unsigned(&word)[4] = reinterpret_cast<const unsigned(&)[4]>(x);
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};"
                 ::"l"(__cvta_generic_to_global(p)), "r"(word[0]), "r"(word[1]), "r"(word[2]), "r"(word[3])
                 : "memory");
    return;
  }
#endif
  *reinterpret_cast<Vec<S, N>*>(p) = x;
}

constexpr unsigned ALL_LANES = 0xffffffffu;
#define NEGATIVE_INFINITY __int_as_float(0xff800000)

// The sum over a warp, in every lane. The order of additions is fixed, so results repeat to the bit.
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int lane = 16; lane > 0; lane >>= 1) x += __shfl_xor_sync(ALL_LANES, x, lane);
  return x;
}

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
  for (int lane = 16; lane > 0; lane >>= 1) x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, lane));
  return x;
}

__device__ __forceinline__ unsigned warp_largest(unsigned x) {
#pragma unroll
  for (int lane = 16; lane > 0; lane >>= 1) x = max(x, __shfl_xor_sync(ALL_LANES, x, lane));
  return x;
}

// What `of_warp_all` makes of the values of a block of Warps warps, in every thread; `none` changes nothing.
template <int Warps, auto of_warp_all, typename V> __device__ __forceinline__ V block_all(V x, V none) {
  x = of_warp_all(x);
  if (Warps == 1) {
    __syncwarp();  // as the barriers below: what a lane read before, no other lane overwrites earlier
    return x;
  }
  __shared__ V of_warp[Warps];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  __syncthreads();  // the values of the call before this one have been read
  if (lane == 0) of_warp[warp] = x;
  __syncthreads();  // every warp's value is there
  return of_warp_all(lane < Warps ? of_warp[lane] : none);
}

template <int Warps> __device__ __forceinline__ float block_sum(float x) { return block_all<Warps, warp_sum>(x, 0.f); }
template <int Warps> __device__ __forceinline__ float block_max(float x) {
  return block_all<Warps, warp_max>(x, NEGATIVE_INFINITY);
}
template <int Warps> __device__ __forceinline__ unsigned block_largest(unsigned x) {
  return block_all<Warps, warp_largest>(x, 0u);
}

// ---- FP8 ---------------------------------------------------------------------------------------------------------------
//
// Magnitudes are compared as whole numbers: the bits of |x|, which have the order of the numbers, infinity above them and
// NaN above it. So neither is lost, and its scale is infinite.

constexpr unsigned INFINITE = 0x7f800000u;
constexpr unsigned SMALLEST = (127u - 100u) << 23;  // 2^-100, so that no scale is zero

template <typename S> __device__ __forceinline__ unsigned magnitude(S x) { return __float_as_uint(widen(x)) & 0x7fffffffu; }

template <typename F> constexpr float TOP = 256.f;  // the largest power of two in a format
template <> constexpr float TOP<e5m2> = 32768.f;

// The least power of two that brings the largest magnitude into the range of a format. Both end at 1.75 times TOP. So a
// mantissa above 1.75 is rounded up to a power of two, any other down: adding the bits that are missing from there to 2
// lets just those carry into the exponent.
template <typename F> __device__ __forceinline__ float scale_of(unsigned largest) {
  const unsigned bits = min(max(largest, SMALLEST), INFINITE);
  return __uint_as_float((bits + 0x1fffffu) & INFINITE) * (1.f / TOP<F>);
}

// 1 / scale, of a power of two or infinity.
__device__ __forceinline__ float inverse(float scale) {
  const unsigned bits = __float_as_uint(scale);
  return bits == INFINITE ? 0.f : __uint_as_float((254u << 23) - bits);
}

template <typename F> __device__ __forceinline__ unsigned narrow_four(float a, float b, float c, float d) {
  return narrow_two<F>(a, b) | narrow_two<F>(c, d) << 16;
}

// Store N numbers times `factor` as neighbours.
template <int N, typename F> __device__ __forceinline__ void store_row(F* p, const float* x, float factor) {
  if constexpr (N == 1) {
    p->bits = narrow_two<F>(*x * factor, 0.f);
  } else {
    Vec<unsigned, N / 4> four;
#pragma unroll
    for (int j = 0; j < N; j += 4)
      four.v[j / 4] = narrow_four<F>(x[j] * factor, x[j + 1] * factor, x[j + 2] * factor, x[j + 3] * factor);
    store<N / 4>(reinterpret_cast<unsigned*>(p), four);
  }
}

// Quantise a row of Pieces vectors, which a block of Warps warps holds, zero beyond its end, and write its scale.
template <int Warps, int Pieces, typename F, typename S, int N, int Items>
__device__ __forceinline__ void quantize_row(const Vec<S, N> (&items)[Items], F* values, float* scale) {
  unsigned largest = 0;
#pragma unroll
  for (int i = 0; i < Items; ++i)
#pragma unroll
    for (int j = 0; j < N; ++j) largest = max(largest, magnitude(items[i].v[j]));
  const float divisor = scale_of<F>(block_largest<Warps>(largest)), factor = inverse(divisor);
  if (threadIdx.x == 0) *scale = divisor;
#pragma unroll
  for (int i = 0; i < Items; ++i) {
    const int piece = i * Warps * 32 + threadIdx.x;
    if (piece >= Pieces) continue;
    float wide[N];
#pragma unroll
    for (int j = 0; j < N; ++j) wide[j] = widen(items[i].v[j]);
    store_row<N>(values + piece * N, wide, factor);
  }
}

// ---- SwiGLU ------------------------------------------------------------------------------------------------------------

__device__ __forceinline__ float sigmoid(float x) { return 1.f / (1.f + __expf(-x)); }

// z = silu(gate) * up, with silu(a) = a / (1 + exp(-a)).
__device__ __forceinline__ float swiglu(float gate, float up) { return gate * sigmoid(gate) * up; }

// dgate = dz * up * s * (1 + gate * (1 - s)) and dup = dz * gate * s, with s = 1 / (1 + exp(-gate)), rounded to S; and z.
template <typename S>
__device__ __forceinline__ void swiglu_gradient(float gate, float up, float dz, S& dgate, S& dup, S& z) {
  const float s = sigmoid(gate), silu = gate * s;
  narrow(dz * up * (s + silu * (1.f - s)), dgate);
  narrow(dz * silu, dup);
  narrow(silu * up, z);
}

// out[c] = sum over blocks of partial[block][c], in fixed order. For blocks of 256 threads, which take 32 columns each.
template <typename S>
__device__ __forceinline__ void sum_columns(const float* __restrict__ partial, S* __restrict__ out, int width, i64 blocks) {
  __shared__ float sums[8][32];
  const int lane = threadIdx.x & 31, part = threadIdx.x >> 5, column = blockIdx.x * 32 + lane;
  float sum = 0.f;
  if (column < width)
    for (i64 block = part; block < blocks; block += 8) sum += partial[block * width + column];
  sums[part][lane] = sum;
  __syncthreads();  // all eight parts of a column are there
  if (part || column >= width) return;
#pragma unroll
  for (int i = 1; i < 8; ++i) sum += sums[i][lane];
  narrow(sum, out[column]);
}
