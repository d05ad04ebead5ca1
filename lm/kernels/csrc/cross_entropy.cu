// Softmax cross-entropy of a chunk of logits, which its gradient overwrites. One block a row.
//
//   lse = log(sum(exp(logits)));  loss = lse - logits[label];  cost = loss + z_loss * lse^2
//   d cost / d logits = (1 + 2 * z_loss * lse) * softmax(logits) - onehot(label)
//
// What is not stored: probabilities, and the logits of more than one chunk. A row is read once and kept in registers
// where it fits, else it is read a second time.
//
// -DT: number format. -DVOCAB. -DSTRIDE: elements from one row to the next, a multiple of VEC, so that vectors are
// aligned whatever the vocabulary; what lies between is ignored and becomes zero. -DVEC. -DWARPS: of a block.
// -DGRADIENT: 0 computes losses alone.
#include "prelude.cuh"

constexpr int PIECES = STRIDE / VEC, THREADS = WARPS * 32;
constexpr int ITEMS = (PIECES + THREADS - 1) / THREADS;
constexpr bool HELD = ITEMS <= 8;  // in registers, packed

extern "C" __global__ void __launch_bounds__(THREADS, 1)
cross_entropy(T* __restrict__ logits, const i64* __restrict__ labels, float* __restrict__ losses,
              float* __restrict__ costs, i64 ignore_index, float z_loss) {
  const i64 row = blockIdx.x, label = labels[row];
  T* at = logits + row * STRIDE;
  if (label == ignore_index) {
    const Vec<T, VEC> zero = {};
    if (GRADIENT)
      for (int piece = threadIdx.x; piece < PIECES; piece += THREADS) store<VEC>(at + piece * VEC, zero);
    if (threadIdx.x == 0) losses[row] = costs[row] = 0.f;
    return;
  }
  const float target = widen(at[label]);  // before anything is overwritten: there are barriers between

  Vec<T, VEC> held[HELD ? ITEMS : 1];
  float most = NEGATIVE_INFINITY, sum = 0.f;  // of this thread: the largest value, and the sum of exp(v - most)
#pragma unroll(HELD ? ITEMS : 2)
  for (int i = 0; i < ITEMS; ++i) {
    const int piece = i * THREADS + threadIdx.x;
    if (piece >= PIECES) continue;
    const Vec<T, VEC> x = load<VEC>(at + piece * VEC);
    if (HELD) held[i] = x;
    float v[VEC], largest = most;
#pragma unroll
    for (int j = 0; j < VEC; ++j) {
      v[j] = piece * VEC + j < VOCAB ? widen(x.v[j]) : NEGATIVE_INFINITY;
      largest = fmaxf(largest, v[j]);
    }
    if (largest == NEGATIVE_INFINITY) continue;
    if (largest > most) sum *= __expf(most - largest);
    most = largest;
#pragma unroll
    for (int j = 0; j < VEC; ++j) sum += __expf(v[j] - most);
  }
  const float top = block_max<WARPS>(most);
  sum = block_sum<WARPS>(most == NEGATIVE_INFINITY ? 0.f : sum * __expf(most - top));
  const float log_sum = logf(sum), lse = top + log_sum;
  if (threadIdx.x == 0) {
    const float loss = top - target + log_sum;  // in this order a confident row keeps all its digits
    losses[row] = loss;
    costs[row] = loss + z_loss * lse * lse;
  }
  if (!GRADIENT) return;

  const float scale = (1.f + 2.f * z_loss * lse) / sum;
#pragma unroll(HELD ? ITEMS : 2)
  for (int i = 0; i < ITEMS; ++i) {
    const int piece = i * THREADS + threadIdx.x;
    if (piece >= PIECES) continue;
    const Vec<T, VEC> x = HELD ? held[i] : load<VEC>(at + piece * VEC);
    Vec<T, VEC> out;
#pragma unroll
    for (int j = 0; j < VEC; ++j) {
      const int column = piece * VEC + j;
      const float d = scale * __expf(widen(x.v[j]) - top) - (column == label ? 1.f : 0.f);
      narrow(column < VOCAB ? d : 0.f, out.v[j]);
    }
    store<VEC>(at + piece * VEC, out);
  }
}
