// SwiGLU on packed rows: gate and up side by side, (rows, 2 * WIDTH) -> (rows, WIDTH).
//
//   z = silu(gate) * up, as the prelude has it and its gradient
//
// What is not stored: z. The backward pass reads gate and up anyway, so it recomputes z for the gradient of the matrix
// that follows; where z was stored nevertheless, its pointer is null there.
//
// -DT: number format. -DWIDTH. -DVEC: neighbours loaded at once; divides WIDTH. One thread a vector.
#include "prelude.cuh"

constexpr int PIECES = WIDTH / VEC;  // of a row of z

extern "C" __global__ void __launch_bounds__(256)
swiglu_forward(const T* __restrict__ gate_up, T* __restrict__ z, i64 pieces) {
  const i64 piece = blockIdx.x * 256ll + threadIdx.x;
  if (piece >= pieces) return;
  const T* gate = gate_up + piece / PIECES * 2 * WIDTH + piece % PIECES * VEC;
  const Vec<T, VEC> g = load<VEC>(gate), u = load<VEC>(gate + WIDTH);
  Vec<T, VEC> out;
#pragma unroll
  for (int j = 0; j < VEC; ++j) narrow(swiglu(widen(g.v[j]), widen(u.v[j])), out.v[j]);
  store<VEC>(z + piece * VEC, out);
}

extern "C" __global__ void __launch_bounds__(256)
swiglu_backward(const T* __restrict__ gate_up, const T* __restrict__ dz, T* __restrict__ dgate_up, T* __restrict__ z,
                i64 pieces) {
  const i64 piece = blockIdx.x * 256ll + threadIdx.x;
  if (piece >= pieces) return;
  const i64 at = piece / PIECES * 2 * WIDTH + piece % PIECES * VEC;
  const Vec<T, VEC> g = load<VEC>(gate_up + at), u = load<VEC>(gate_up + at + WIDTH), d = load<VEC>(dz + piece * VEC);
  Vec<T, VEC> dg, du, out;
#pragma unroll
  for (int j = 0; j < VEC; ++j)
    swiglu_gradient(widen(g.v[j]), widen(u.v[j]), widen(d.v[j]), dg.v[j], du.v[j], out.v[j]);
  store<VEC>(dgate_up + at, dg);
  store<VEC>(dgate_up + at + WIDTH, du);
  store<VEC>(z + piece * VEC, out);
}
