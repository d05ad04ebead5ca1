// Softmax cross-entropy of a chunk of logits, which its gradient overwrites. One block a row.
//
//   lse = log(sum(exp(logits)));  loss = lse - logits[label]
//   d loss / d logits = softmax(logits) - onehot(label)
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
constexpr int GROUP = ITEMS < 4 ? ITEMS : 4;  // vectors that a thread loads at once, before it computes with the first

// Whether vector `piece` of a row and its element `j` are there at all; most vocabularies fill their rows.
__device__ __forceinline__ bool exists(int piece, int j) {
  if (VOCAB == ITEMS * THREADS * VEC) return true;
  return VOCAB == STRIDE ? piece < PIECES : piece * VEC + j < VOCAB;
}

// The group of vectors of a row from `first` on. A thread that is beyond the row's end loads another one, which counts for
// nothing: without a branch the loads are issued together. Where the row is overwritten meanwhile, that is its own first.
__device__ __forceinline__ void load_group(const T* at, int first, Vec<T, VEC> (&x)[GROUP]) {
#pragma unroll
  for (int g = 0; g < GROUP; ++g) {
    const int piece = (first + g) * THREADS + threadIdx.x;
    x[g] = load<VEC>(at + (piece < PIECES ? piece : HELD ? PIECES - 1 : threadIdx.x) * VEC);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1024 / THREADS)
cross_entropy(T* __restrict__ logits, const i64* __restrict__ labels, float* __restrict__ losses,
              i64 ignore_index) {
  const i64 row = blockIdx.x, label = labels[row];
  T* at = logits + row * STRIDE;
  if (label == ignore_index) {
    const Vec<T, VEC> zero = {};
    if (GRADIENT)
      for (int piece = threadIdx.x; piece < PIECES; piece += THREADS) store<VEC>(at + piece * VEC, zero);
    if (threadIdx.x == 0) losses[row] = 0.f;
    return;
  }
  // Read before anything is overwritten: there are barriers between. A label that is no token makes the loss NaN.
  const float target = 0 <= label && label < VOCAB ? widen(at[label]) : __int_as_float(0x7fffffff);

  Vec<T, VEC> held[HELD ? ITEMS : 1];
  float most = NEGATIVE_INFINITY, sum = 0.f;  // of this thread: the largest value, and the sum of exp(v - most)
#pragma unroll(HELD ? ITEMS : 1)
  for (int first = 0; first < ITEMS; first += GROUP) {
    Vec<T, VEC> x[GROUP];
    load_group(at, first, x);
#pragma unroll
    for (int g = 0; g < GROUP; ++g) {
      const int piece = (first + g) * THREADS + threadIdx.x;
      if (HELD && first + g < ITEMS) held[first + g] = x[g];
      float v[VEC], largest = most;
#pragma unroll
      for (int j = 0; j < VEC; ++j) {
        v[j] = exists(piece, j) ? widen(x[g].v[j]) : NEGATIVE_INFINITY;
        largest = fmaxf(largest, v[j]);
      }
      if (largest == NEGATIVE_INFINITY) continue;
      if (largest > most) sum *= __expf(most - largest);
      most = largest;
#pragma unroll
      for (int j = 0; j < VEC; ++j) sum += __expf(v[j] - most);
    }
  }
  const float top = block_max<WARPS>(most);
  sum = block_sum<WARPS>(most == NEGATIVE_INFINITY ? 0.f : sum * __expf(most - top));
  // In this order a confident row keeps all its digits.
  if (threadIdx.x == 0) losses[row] = top - target + logf(sum);
  if (!GRADIENT) return;

  const float scale = 1.f / sum;
  // The compiler must not know these values again: it would keep them widened, in twice the registers.
#pragma unroll
  for (int i = 0; i < (HELD ? ITEMS : 0); ++i)
    for (unsigned& word : reinterpret_cast<unsigned (&)[4]>(held[i])) asm volatile("" : "+r"(word));
#pragma unroll(HELD ? ITEMS : 1)
  for (int first = 0; first < ITEMS; first += GROUP) {
    Vec<T, VEC> x[GROUP];
    if (!HELD) load_group(at, first, x);
#pragma unroll
    for (int g = 0; g < GROUP; ++g) {
      const int piece = (first + g) * THREADS + threadIdx.x;
      if (VOCAB != ITEMS * THREADS * VEC && piece >= PIECES) continue;
      if (HELD && first + g < ITEMS) x[g] = held[first + g];
      const int hit = (int)label - piece * VEC;  // the label's element, if it is in this vector
#pragma unroll
      for (int j = 0; j < VEC; ++j) {
        const float d = scale * __expf(widen(x[g].v[j]) - top) - (j == hit ? 1.f : 0.f);
        narrow(exists(piece, j) ? d : 0.f, x[g].v[j]);
      }
      store<VEC>(at + piece * VEC, x[g]);
    }
  }
}
