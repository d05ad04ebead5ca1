// A matrix in FP8 and its transpose, for the products of a linear layer: (rows, WIDTH) -> (rows, WIDTH), (WIDTH, rows).
//
//   scale = the least power of two that brings the largest |x| into the range of F;  values = x / scale
//
// The largest value is that of the matrix, or with ROWWISE of each row, and of each column for the transpose. What is not
// stored: anything wider than FP8. The transpose goes through shared memory and not through a second pass.
//
// -DT: number format of x. -DF: e4m3 or e5m2. -DTOP: the largest power of two in F. -DWIDTH. -DVEC: neighbours loaded at
// once; divides WIDTH. -DROWWISE. -DTRANSPOSED_VEC: neighbours of the transpose stored at once, 16 or 1; divides rows.
// -DWARPS: of a block of fp8_rows.
#include "prelude.cuh"

// ---- a scale for each row, without the transpose: one block a row, one pass -------------------------------------------

constexpr int PIECES = WIDTH / VEC;  // of a row
constexpr int ITEMS = (PIECES + WARPS * 32 - 1) / (WARPS * 32);

extern "C" __global__ void __launch_bounds__(WARPS * 32)
fp8_rows(const T* __restrict__ x, F* __restrict__ values, float* __restrict__ scales) {
  const i64 row = blockIdx.x, base = row * WIDTH;
  Vec<T, VEC> items[ITEMS] = {};
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) {
    const int piece = i * WARPS * 32 + threadIdx.x;
    if (piece < PIECES) items[i] = load<VEC>(x + base + piece * VEC);
  }
  quantize_row<TOP, WARPS, PIECES>(items, values + base, scales + row);
}

// ---- tiles: a block of 256 threads, 32 down and 8 across, each with 4 rows of VEC neighbours --------------------------

constexpr int TILE_ROWS = 128, TILE_COLUMNS = 8 * VEC;
constexpr int TILES_ACROSS = (WIDTH + TILE_COLUMNS - 1) / TILE_COLUMNS;

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

// This thread's part of the tile, zero beyond the matrix.
__device__ __forceinline__ void load_part(const T* x, const Place& at, i64 rows, Vec<T, VEC> (&part)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i)
    if (at.row + i < rows && at.column < WIDTH) part[i] = load<VEC>(x + (at.row + i) * WIDTH + at.column);
}

// The largest magnitudes of all rows, then of all columns, in memory that is zero before. The order of the blocks does not
// matter to a maximum.
extern "C" __global__ void __launch_bounds__(256)
fp8_largest_of_rows_and_columns(const T* __restrict__ x, unsigned* __restrict__ largest, i64 rows) {
  const Place at = place();
  Vec<T, VEC> part[4] = {};
  load_part(x, at, rows, part);
  unsigned row[4] = {}, column[VEC] = {};
#pragma unroll
  for (int i = 0; i < 4; ++i)
#pragma unroll
    for (int j = 0; j < VEC; ++j) {
      row[i] = max(row[i], magnitude(part[i].v[j]));
      column[j] = max(column[j], magnitude(part[i].v[j]));
    }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int lane = 4; lane > 0; lane >>= 1) row[i] = max(row[i], __shfl_xor_sync(ALL_LANES, row[i], lane));
    if (at.across == 0 && at.row + i < rows) atomicMax(largest + at.row + i, row[i]);
  }
  __shared__ unsigned of_warp[8][TILE_COLUMNS];
#pragma unroll
  for (int j = 0; j < VEC; ++j) {
#pragma unroll
    for (int lane = 16; lane > 4; lane >>= 1) column[j] = max(column[j], __shfl_xor_sync(ALL_LANES, column[j], lane));
    if (at.down % 4 == 0) of_warp[threadIdx.x >> 5][at.across * VEC + j] = column[j];
  }
  __syncthreads();  // every warp's largest values are there
  if (threadIdx.x >= TILE_COLUMNS || at.first_column + (int)threadIdx.x >= WIDTH) return;
  unsigned most = 0;
#pragma unroll
  for (int warp = 0; warp < 8; ++warp) most = max(most, of_warp[warp][threadIdx.x]);
  atomicMax(largest + rows + at.first_column + threadIdx.x, most);
}

// The largest magnitude of what a block walks over, for each block.
extern "C" __global__ void __launch_bounds__(1024)
fp8_largest(const T* __restrict__ x, unsigned* __restrict__ largest, i64 pieces) {
  unsigned most = 0;
#pragma unroll 4
  for (i64 piece = blockIdx.x * 1024ll + threadIdx.x; piece < pieces; piece += gridDim.x * 1024ll) {
    const Vec<T, VEC> part = load<VEC>(x + piece * VEC);
#pragma unroll
    for (int j = 0; j < VEC; ++j) most = max(most, magnitude(part.v[j]));
  }
  most = block_largest<32>(most);
  if (threadIdx.x == 0) largest[blockIdx.x] = most;
}

// `largest` is as one of the two kernels before left it, of `parts` blocks. `values` or `transposed` may be null. Without
// ROWWISE there is one scale, for both.
extern "C" __global__ void __launch_bounds__(256)
fp8_quantize(const T* __restrict__ x, const unsigned* __restrict__ largest, F* __restrict__ values,
             float* __restrict__ scales, F* __restrict__ transposed, float* __restrict__ transposed_scales, i64 rows,
             i64 parts) {
  const Place at = place();
  Vec<T, VEC> part[4] = {};
  load_part(x, at, rows, part);
  float of_row[4], of_column[VEC];  // 1 / scale
  if (ROWWISE) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float scale = scale_of<TOP>(at.row + i < rows ? largest[at.row + i] : 0);
      of_row[i] = inverse(scale);
      if (values && at.column == 0 && at.row + i < rows) scales[at.row + i] = scale;
    }
#pragma unroll
    for (int j = 0; j < VEC; ++j) {
      const float scale = scale_of<TOP>(at.column + j < WIDTH ? largest[rows + at.column + j] : 0);
      of_column[j] = inverse(scale);
      if (transposed && at.row == 0 && at.column + j < WIDTH) transposed_scales[at.column + j] = scale;
    }
  } else {
    unsigned most = 0;
    for (int i = threadIdx.x; i < parts; i += 256) most = max(most, largest[i]);
    const float scale = scale_of<TOP>(block_largest<8>(most)), factor = inverse(scale);
    if (blockIdx.x == 0 && threadIdx.x == 0) *scales = scale;
#pragma unroll
    for (int i = 0; i < 4; ++i) of_row[i] = factor;
#pragma unroll
    for (int j = 0; j < VEC; ++j) of_column[j] = factor;
  }

  float wide[4][VEC];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int j = 0; j < VEC; ++j) wide[i][j] = widen(part[i].v[j]);
    if (values && at.row + i < rows && at.column < WIDTH)
      store_row<VEC>(values + (at.row + i) * WIDTH + at.column, wide[i], of_row[i]);
  }
  if (!transposed) return;

  // A column of the tile is 8 vectors of 16 rows; a warp's 16 rows are one. Where a vector lies in its row of shared memory
  // depends on the column, so that the 32 lanes, 8 columns apart from each other, write to 32 banks.
  __shared__ Vec<unsigned, 4> tile[TILE_COLUMNS][8];
#pragma unroll
  for (int j = 0; j < VEC; ++j)
    tile[at.across * VEC + j][(threadIdx.x >> 5) ^ at.across].v[at.down % 4] = narrow_four<F>(
        wide[0][j] * of_column[j], wide[1][j] * of_column[j], wide[2][j] * of_column[j], wide[3][j] * of_column[j]);
  __syncthreads();  // the tile is whole
  for (int piece = threadIdx.x; piece < TILE_COLUMNS * 8; piece += 256) {
    const int column = piece >> 3, vector = piece & 7;
    const i64 row = at.first_row + vector * 16;
    if (at.first_column + column >= WIDTH || row >= rows) continue;
    const Vec<unsigned, 4> rows_16 = tile[column][vector ^ column / VEC];
    F* out = transposed + (at.first_column + column) * rows + row;
    if (TRANSPOSED_VEC == 16) {
      store<4>(reinterpret_cast<unsigned*>(out), rows_16);
    } else {
#pragma unroll
      for (int i = 0; i < 16; ++i)
        if (row + i < rows) out[i].bits = rows_16.v[i / 4] >> i % 4 * 8;
    }
  }
}
