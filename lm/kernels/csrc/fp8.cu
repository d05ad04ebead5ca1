// A matrix in FP8 and its transpose, for the products of a linear layer: (rows, WIDTH) -> (rows, WIDTH), (WIDTH, rows).
//
//   scale = the least power of two that brings the largest |x| into the range of F;  values = x / scale
//
// The largest value is that of the matrix, or with ROWWISE of each row, and of each column for the transpose. What is not
// stored: anything wider than FP8. The transpose goes through shared memory and not through a second pass. Where the
// matrix is the result of another op, that is not stored either: both kernels, the one that finds the largest values and
// the one that quantises, compute it from what the op reads.
//
// -DSOURCE: what is quantised, each with the numbers of the kernel that it is named after.
//   MATRIX           x
//   NORMED           y of rms_norm.cu: x is the stream
//   SWIGLU           z of swiglu.cu: x is gate and up, (rows, 2 * WIDTH)
//   SWIGLU_GRADIENT  its backward pass: the gradients of gate and up side by side, (rows, 2 * WIDTH), whose rows have one
//                    scale; and z, of which only the transpose is returned, always in e4m3
// -DT, -DW: number formats of activations and of a norm's weight. -DF: e4m3 or e5m2. -DWIDTH: of a part, see PARTS.
// -DVEC: neighbours loaded at once; divides WIDTH. -DROWWISE. -DTRANSPOSED_VEC: neighbours of the transpose stored at
// once, 16 or 1; divides rows. -DWARPS: of a block of fp8_rows.
#include "prelude.cuh"

enum { MATRIX, NORMED, SWIGLU, SWIGLU_GRADIENT };
constexpr int PARTS = SOURCE == SWIGLU_GRADIENT ? 3 : 1;  // gradient of gate, of up, and z; or the matrix
constexpr int MATRIX_PARTS = SOURCE == SWIGLU_GRADIENT ? 2 : 1;  // which are one matrix, side by side; z is another
constexpr int PIECES = WIDTH / VEC;  // of a row of a part

// ---- what is quantised -------------------------------------------------------------------------------------------------

// N vectors of every part, each Down rows below and Right columns after the one before; zero beyond the matrix. All loads
// come before the first number is computed.
template <int N, int Down, int Right>
__device__ __forceinline__ void parts_of(const T* x, const T* dz, const W* weight, const float* rstd, i64 row, i64 rows,
                                         int column, Vec<T, VEC> (&part)[PARTS][N]) {
  Vec<T, VEC> up[N] = {}, d[N] = {};
  Vec<W, VEC> w[N] = {};
  float scale[N] = {};
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const i64 y = row + i * Down;
    const int at = column + i * Right;
    if (y >= rows || at >= WIDTH) continue;
    const T* from = x + y * (SOURCE >= SWIGLU ? 2 * WIDTH : WIDTH) + at;
    part[0][i] = load<VEC>(from);
    if (SOURCE == NORMED) scale[i] = rstd[y];
    if (SOURCE == NORMED) w[i] = load<VEC>(weight + at);
    if (SOURCE >= SWIGLU) up[i] = load<VEC>(from + WIDTH);
    if (SOURCE == SWIGLU_GRADIENT) d[i] = load<VEC>(dz + y * WIDTH + at);
  }
#pragma unroll
  for (int i = 0; i < N; ++i)
#pragma unroll
    for (int j = 0; j < VEC; ++j) {
      T& value = part[0][i].v[j];
      if (SOURCE == NORMED) narrow(widen(value) * scale[i] * widen(w[i].v[j]), value);
      if (SOURCE == SWIGLU) narrow(swiglu(widen(value), widen(up[i].v[j])), value);
      if constexpr (SOURCE == SWIGLU_GRADIENT)
        swiglu_gradient(widen(value), widen(up[i].v[j]), widen(d[i].v[j]), value, part[1][i].v[j], part[2][i].v[j]);
    }
}

// ---- a scale for each row, without the transpose: one block a row, one pass -------------------------------------------

constexpr int ITEMS = (PIECES + WARPS * 32 - 1) / (WARPS * 32);

extern "C" __global__ void __launch_bounds__(WARPS * 32)
fp8_rows(const T* __restrict__ x, const T* __restrict__ dz, const W* __restrict__ weight, const float* __restrict__ rstd,
         F* __restrict__ values, float* __restrict__ scales) {
  const i64 row = blockIdx.x;
  Vec<T, VEC> items[PARTS][ITEMS] = {};
  parts_of<ITEMS, 0, WARPS * 32 * VEC>(x, dz, weight, rstd, row, row + 1, threadIdx.x * VEC, items);
  quantize_row<WARPS, PIECES>(items[0], values + row * WIDTH, scales + row);
}

// ---- tiles: a block of 256 threads, 32 down and 8 across, each with 4 rows of VEC neighbours --------------------------

constexpr int TILE_ROWS = 128, TILE_COLUMNS = 8 * VEC;
constexpr int TILES_ACROSS = (WIDTH + TILE_COLUMNS - 1) / TILE_COLUMNS;
constexpr int RESIDENT = SOURCE == MATRIX ? 4 : SOURCE == NORMED ? 3 : 2;  // blocks of a multiprocessor: bounds registers

struct Place {
  int across, down;  // of this thread in the tile
  i64 first_row, row;  // of the tile and of this thread, in the matrix
  int first_column, column;
};

__device__ __forceinline__ Place place() {
  const int across = threadIdx.x & 7, down = threadIdx.x >> 3;
  const i64 first_row = (i64)(blockIdx.x / TILES_ACROSS) * TILE_ROWS;
  const int first_column = blockIdx.x % TILES_ACROSS * TILE_COLUMNS;
  return {across, down, first_row, first_row + 4 * down, first_column, first_column + across * VEC};
}

// The largest magnitudes of all rows, then of all columns of each part, in memory that is zero before. The order of the
// blocks does not matter to a maximum.
extern "C" __global__ void __launch_bounds__(256, RESIDENT)
fp8_largest_of_rows_and_columns(const T* __restrict__ x, const T* __restrict__ dz, const W* __restrict__ weight,
                                const float* __restrict__ rstd, unsigned* __restrict__ largest, i64 rows) {
  const Place at = place();
  Vec<T, VEC> part[PARTS][4] = {};
  parts_of<4, 1, 0>(x, dz, weight, rstd, at.row, rows, at.column, part);
  unsigned row[4] = {};
  __shared__ unsigned of_warp[PARTS][8][TILE_COLUMNS];
#pragma unroll
  for (int p = 0; p < PARTS; ++p) {
    unsigned column[VEC] = {};
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int j = 0; j < VEC; ++j) {
        const unsigned size = magnitude(part[p][i].v[j]);
        if (p < MATRIX_PARTS) row[i] = max(row[i], size);
        column[j] = max(column[j], size);
      }
#pragma unroll
    for (int j = 0; j < VEC; ++j) {
#pragma unroll
      for (int lane = 16; lane > 4; lane >>= 1) column[j] = max(column[j], __shfl_xor_sync(ALL_LANES, column[j], lane));
      if (at.down % 4 == 0) of_warp[p][threadIdx.x >> 5][at.across * VEC + j] = column[j];
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int lane = 4; lane > 0; lane >>= 1) row[i] = max(row[i], __shfl_xor_sync(ALL_LANES, row[i], lane));
    if (at.across == 0 && at.row + i < rows) atomicMax(largest + at.row + i, row[i]);
  }
  __syncthreads();  // every warp's largest values are there
  if (threadIdx.x >= TILE_COLUMNS || at.first_column + (int)threadIdx.x >= WIDTH) return;
#pragma unroll
  for (int p = 0; p < PARTS; ++p) {
    unsigned most = 0;
#pragma unroll
    for (int warp = 0; warp < 8; ++warp) most = max(most, of_warp[p][warp][threadIdx.x]);
    atomicMax(largest + rows + p * WIDTH + at.first_column + threadIdx.x, most);
  }
}

// The largest magnitude of what a block walks over, for each block; and, in a second row, that of z.
extern "C" __global__ void __launch_bounds__(1024, 1)
fp8_largest(const T* __restrict__ x, const T* __restrict__ dz, const W* __restrict__ weight,
            const float* __restrict__ rstd, unsigned* __restrict__ largest, i64 rows) {
  unsigned most = 0, most_of_z = 0;
#pragma unroll SOURCE == SWIGLU_GRADIENT ? 1 : SOURCE == SWIGLU ? 2 : 4
  for (i64 piece = blockIdx.x * 1024ll + threadIdx.x; piece < rows * PIECES; piece += gridDim.x * 1024ll) {
    Vec<T, VEC> part[PARTS][1] = {};
    parts_of<1, 0, 0>(x, dz, weight, rstd, piece / PIECES, rows, (int)(piece % PIECES) * VEC, part);
#pragma unroll
    for (int p = 0; p < PARTS; ++p)
#pragma unroll
      for (int j = 0; j < VEC; ++j) {
        unsigned& of_matrix = p < MATRIX_PARTS ? most : most_of_z;
        of_matrix = max(of_matrix, magnitude(part[p][0].v[j]));
      }
  }
  most = block_largest<32>(most);
  if (threadIdx.x == 0) largest[blockIdx.x] = most;
  if (PARTS == MATRIX_PARTS) return;
  most_of_z = block_largest<32>(most_of_z);
  if (threadIdx.x == 0) largest[gridDim.x + blockIdx.x] = most_of_z;
}

// 1 / scale of a whole matrix, whose largest values `fp8_largest` has found.
template <typename G>
__device__ __forceinline__ float factor_of(const unsigned* largest, i64 blocks, float* scale) {
  unsigned most = 0;
  for (int i = threadIdx.x; i < blocks; i += 256) most = max(most, largest[i]);
  const float divisor = scale_of<G>(block_largest<8>(most));
  if (blockIdx.x == 0 && threadIdx.x == 0) *scale = divisor;
  return inverse(divisor);
}

// Store the transpose of a part of the tile, times `factor` or, where each column has a scale, by the largest values of the
// columns. `largest`, `scales` and `transposed` are those of the part's first column on.
template <typename G>
__device__ __forceinline__ void store_transposed(const Vec<T, VEC> (&part)[4], float factor, const Place& at, i64 rows,
                                                 const unsigned* largest, float* scales, G* transposed) {
  // A column of the tile is 8 vectors of 16 rows; a warp's 16 rows are one. Where a vector lies in its row of shared memory
  // depends on the column, so that the 32 lanes, 8 columns apart from each other, write to 32 banks.
  __shared__ Vec<unsigned, 4> tile[TILE_COLUMNS][8];
  __syncthreads();  // the tile of the part before this one has been read
#pragma unroll
  for (int j = 0; j < VEC; ++j) {
    if (ROWWISE) {
      const float scale = scale_of<G>(at.column + j < WIDTH ? largest[at.column + j] : 0);
      factor = inverse(scale);
      if (at.row == 0 && at.column + j < WIDTH) scales[at.column + j] = scale;
    }
    tile[at.across * VEC + j][(threadIdx.x >> 5) ^ at.across].v[at.down % 4] =
        narrow_four<G>(widen(part[0].v[j]) * factor, widen(part[1].v[j]) * factor, widen(part[2].v[j]) * factor,
                       widen(part[3].v[j]) * factor);
  }
  __syncthreads();  // the tile is whole
  for (int piece = threadIdx.x; piece < TILE_COLUMNS * 8; piece += 256) {
    const int column = piece >> 3, vector = piece & 7;
    const i64 row = at.first_row + vector * 16;
    if (at.first_column + column >= WIDTH || row >= rows) continue;
    const Vec<unsigned, 4> rows_16 = tile[column][vector ^ column / VEC];
    G* out = transposed + (at.first_column + column) * rows + row;
    if (TRANSPOSED_VEC == 16) {
      store<4>(reinterpret_cast<unsigned*>(out), rows_16);
    } else {
#pragma unroll
      for (int i = 0; i < 16; ++i)
        if (row + i < rows) out[i].bits = rows_16.v[i / 4] >> i % 4 * 8;
    }
  }
}

// `largest` is as one of the two kernels before left it, of `blocks` blocks. `values`, `transposed` or `z`, a transpose,
// may be null. Without ROWWISE there is one scale, for a matrix and its transpose.
extern "C" __global__ void __launch_bounds__(256, RESIDENT)
fp8_quantize(const T* __restrict__ x, const T* __restrict__ dz, const W* __restrict__ weight,
             const float* __restrict__ rstd, const unsigned* __restrict__ largest, F* __restrict__ values,
             float* __restrict__ scales, F* __restrict__ transposed, float* __restrict__ transposed_scales,
             e4m3* __restrict__ z, float* __restrict__ z_scales, i64 rows, i64 blocks) {
  const Place at = place();
  Vec<T, VEC> part[PARTS][4] = {};
  parts_of<4, 1, 0>(x, dz, weight, rstd, at.row, rows, at.column, part);
  float factor = 0.f, z_factor = 0.f, of_row[4];  // 1 / scale
  if (!ROWWISE) factor = factor_of<F>(largest, blocks, scales);
  if (!ROWWISE && PARTS > MATRIX_PARTS) z_factor = factor_of<e4m3>(largest + blocks, blocks, z_scales);
#pragma unroll
  for (int i = 0; i < 4 && values; ++i) {
    of_row[i] = factor;
    if (!ROWWISE || at.row + i >= rows) continue;
    const float scale = scale_of<F>(largest[at.row + i]);
    of_row[i] = inverse(scale);
    if (at.column == 0) scales[at.row + i] = scale;
  }
  const unsigned* of_columns = largest + rows;
#pragma unroll
  for (int p = 0; p < MATRIX_PARTS; ++p) {
#pragma unroll
    for (int i = 0; i < 4 && values; ++i) {
      if (at.row + i >= rows || at.column >= WIDTH) continue;
      float wide[VEC];
#pragma unroll
      for (int j = 0; j < VEC; ++j) wide[j] = widen(part[p][i].v[j]);
      store_row<VEC>(values + ((at.row + i) * MATRIX_PARTS + p) * WIDTH + at.column, wide, of_row[i]);
    }
    F* below = transposed + (i64)p * WIDTH * rows;
    if (transposed)
      store_transposed(part[p], factor, at, rows, of_columns + p * WIDTH, transposed_scales + p * WIDTH, below);
  }
  if (z) store_transposed(part[PARTS - 1], z_factor, at, rows, of_columns + 2 * WIDTH, z_scales, z);
}
