// Rows of fp16 numbers, rotated and rounded to int8, on Hopper GPUs.
//
// This computes what the kernel `_round_rows` of kernels.py computes, up to rounding, and faster. An
// optional preparation (layer norm or exact GELU) is followed by the rotation: each 64 neighbouring
// numbers of a row are multiplied with the normalised Hadamard matrix. That matrix is a product of
// six sparse ones, so six rounds of sums and differences ("butterflies") replace the multiplication.
// The rounds run in fp16, two numbers at a time. Then the row is rounded in equal steps.
//
// A warp holds 2,560 numbers of a row: 5 groups of 512 columns. In a group, four neighbouring lanes
// share a block of 64 columns. A lane holds two runs of 8 columns of its block, 32 columns apart:
//
//   column in the block = 32 * run + 8 * (lane % 4) + place in the run
//
// So the butterflies between bits 0, 1, 2 and 5 of the column stay within the lane, and those of
// bits 3 and 4 exchange numbers with the neighbouring lanes.
//
// Each warp treats many rows, and loads the next one while it computes with the present one.
//
// `build.py` compiles this file into a shared library. `hopper.py` loads it.

#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace {

constexpr int kLanes = 32;
constexpr int kWarpsOfBlock = 4;
constexpr int kThreads = kWarpsOfBlock * kLanes;
constexpr int kBlocksOfMultiprocessor = 4;  // 128 registers for each thread
constexpr int kGroups = 5;
constexpr int kRuns = 2 * kGroups;  // runs of 8 columns that a lane holds
constexpr int kPairs = 4 * kRuns;   // the same numbers, as pairs
constexpr int kColumnsOfGroup = 512;
constexpr int kColumnsOfWarp = kGroups * kColumnsOfGroup;
constexpr float kNormalisation = 0.125f;  // 1 / sqrt(64)
constexpr float kLargestInt8 = 127.0f;
constexpr float kSmallestRow = 1e-10f;  // a row of zeros must not divide by zero
constexpr float kLargestHalf = 65504.0f;
constexpr unsigned kAllLanes = 0xffffffffu;

enum class Preparation { kNone, kNorm, kGelu };

struct Rows {
  const __half* x;       // [rows, width]
  const __half* weight;  // of a norm, [width]
  const __half* bias;    // of a norm, [width]
  int8_t* out;           // [rows, width]
  float* step;           // [rows]: what undoes the rounding
  int rows;
  float eps;
};

// The numbers of a row that a lane holds, run by run.
struct Numbers {
  __half2 pairs[kPairs];
};

// Returns the first column of a run, within the 2,560 columns of the warp.
__device__ __forceinline__ int first_column(int run, int lane) {
  int group = run / 2;
  int block = lane / 4;
  return group * kColumnsOfGroup + 64 * block + 32 * (run % 2) + 8 * (lane % 4);
}

__device__ __forceinline__ void unpack(uint4 bytes, __half2 (&pairs)[4]) {
  memcpy(pairs, &bytes, sizeof(bytes));
}

// Loads the part of a row that begins at `from`. Each number is read once, so it need not stay in
// the cache.
__device__ __forceinline__ void load(const __half* from, int lane, Numbers& numbers) {
#pragma unroll
  for (int run = 0; run < kRuns; ++run) {
    __half2 loaded[4];
    unpack(__ldcs(reinterpret_cast<const uint4*>(from + first_column(run, lane))), loaded);
#pragma unroll
    for (int j = 0; j < 4; ++j) numbers.pairs[4 * run + j] = loaded[j];
  }
}

__device__ __forceinline__ float sum_of_warp(float x) {
#pragma unroll
  for (int distance = kLanes / 2; distance > 0; distance /= 2) {
    x += __shfl_xor_sync(kAllLanes, x, distance);
  }
  return x;
}

// Returns GELU of 8 y, divided by 8. It is exact GELU without a branch, see `branchless_gelu` in
// kernels.py: the coefficients are those of that function times powers of 8.
__device__ __forceinline__ float eighth_of_gelu(float y) {
  float size = fabsf(y);
  float log2_tail = fmaf(-1.7934565e-06f * 2097152, size, 6.09042e-05f * 262144);
  log2_tail = fmaf(log2_tail, size, -0.00092602923f * 32768);
  log2_tail = fmaf(log2_tail, size, 0.008493758f * 4096);
  log2_tail = fmaf(log2_tail, size, -0.05393785f * 512);
  log2_tail = fmaf(log2_tail, size, -0.4584805f * 64);
  log2_tail = fmaf(log2_tail, size, -1.1512468f * 8);
  log2_tail = fmaf(log2_tail, size, -0.99999547f);
  float tail;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(tail) : "f"(log2_tail));
  return fmaf(-size, tail, fmaxf(y, 0.0f));
}

// Applies a layer norm to a row that one warp holds, in float32, and normalises for the rotation.
__device__ __forceinline__ void apply_norm(const Rows& r, int lane, Numbers& numbers) {
  constexpr float kWidth = kColumnsOfWarp;
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    float2 v = __half22float2(numbers.pairs[i]);
    sum += v.x + v.y;
  }
  const float mean = sum_of_warp(sum) / kWidth;
  float squares = 0;
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    float2 v = __half22float2(numbers.pairs[i]);
    v.x -= mean;
    v.y -= mean;
    squares = fmaf(v.x, v.x, squares);
    squares = fmaf(v.y, v.y, squares);
  }
  const float factor = rsqrtf(sum_of_warp(squares) / kWidth + r.eps);
#pragma unroll
  for (int run = 0; run < kRuns; ++run) {
    const int column = first_column(run, lane);
    __half2 weight[4], bias[4];
    unpack(__ldg(reinterpret_cast<const uint4*>(r.weight + column)), weight);
    unpack(__ldg(reinterpret_cast<const uint4*>(r.bias + column)), bias);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      float2 v = __half22float2(numbers.pairs[4 * run + j]);
      float2 w = __half22float2(weight[j]);
      float2 b = __half22float2(bias[j]);
      v.x = fmaf((v.x - mean) * factor, w.x, b.x);
      v.y = fmaf((v.y - mean) * factor, w.y, b.y);
      const __half2 pair = __floats2half2_rn(v.x, v.y);
      numbers.pairs[4 * run + j] = __hmul2(pair, __float2half2_rn(kNormalisation));
    }
  }
}

// Multiplies each block of 64 columns with the Hadamard matrix (without its normalisation).
__device__ __forceinline__ void rotate(int lane, Numbers& numbers) {
  const __half2 plus_minus = __floats2half2_rn(1.0f, -1.0f);
  const __half2 sign_8 = __float2half2_rn(lane & 1 ? -1.0f : 1.0f);
  const __half2 sign_16 = __float2half2_rn(lane & 2 ? -1.0f : 1.0f);
#pragma unroll
  for (int group = 0; group < kGroups; ++group) {
    __half2* p = numbers.pairs + 8 * group;
    // Columns at a distance of 1 are the two halves of a pair: (a, b) becomes (a + b, a - b).
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      p[i] = __hfma2(__high2half2(p[i]), plus_minus, __low2half2(p[i]));
    }
    // Distances of 2, 4 and 32 columns are 1, 2 and 4 pairs.
#pragma unroll
    for (int distance = 1; distance < 8; distance *= 2) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if (i & distance) continue;
        const __half2 first = p[i];
        const __half2 second = p[i + distance];
        p[i] = __hadd2(first, second);
        p[i + distance] = __hsub2(first, second);
      }
    }
    // Distances of 8 and 16 columns are 1 and 2 lanes.
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      p[i] = __hfma2(p[i], sign_8, __shfl_xor_sync(kAllLanes, p[i], 1));
      p[i] = __hfma2(p[i], sign_16, __shfl_xor_sync(kAllLanes, p[i], 2));
    }
  }
}

// Returns the largest absolute value that the lane holds.
__device__ __forceinline__ float largest_of_lane(const Numbers& numbers) {
  __half2 largest = __float2half2_rn(0.0f);
#pragma unroll
  for (int i = 0; i < kPairs; ++i) largest = __hmax2(largest, __habs2(numbers.pairs[i]));
  return fmaxf(__low2float(largest), __high2float(largest));
}

__device__ __forceinline__ uint32_t bits(__half2 pair) {
  uint32_t result;
  memcpy(&result, &pair, sizeof(result));
  return result;
}

// Returns four numbers times `scale`, rounded to int8, halves to even. The products must lie between
// -127.5 and 127.5. After 1.5 * 2**10 is added, a fp16 has no bits left for fractions. So the
// addition rounds, and the lowest byte of the fp16 is the rounded number as int8.
__device__ __forceinline__ uint32_t four_int8(__half2 first, __half2 second, __half2 scale) {
  const __half2 rounder = __float2half2_rn(1536.0f);
  const uint32_t a = bits(__hfma2(first, scale, rounder));
  const uint32_t b = bits(__hfma2(second, scale, rounder));
  return __byte_perm(a, b, 0x6420);
}

template <Preparation preparation, int kWarps>  // warps of a row: 1 or 4
__global__ void __launch_bounds__(kThreads, kBlocksOfMultiprocessor) round_rows(Rows r) {
  constexpr int kWidth = kWarps * kColumnsOfWarp;
  constexpr int kRowsOfBlock = kWarpsOfBlock / kWarps;
  const int warp = threadIdx.x / kLanes;
  const int lane = threadIdx.x % kLanes;
  const int first_row = blockIdx.x * kRowsOfBlock + warp / kWarps;
  const int rows_at_once = gridDim.x * kRowsOfBlock;
  const int part = (warp % kWarps) * kColumnsOfWarp;  // the first column of this warp
  __shared__ float largest_of_warp[2][kWarpsOfBlock];  // of the present and of the last row

  Numbers next;
  if (first_row < r.rows) load(r.x + int64_t{first_row} * kWidth + part, lane, next);
  int turn = 0;
  for (int row = first_row; row < r.rows; row += rows_at_once) {
    Numbers numbers = next;
    const int next_row = row + rows_at_once;
    if (next_row < r.rows) load(r.x + int64_t{next_row} * kWidth + part, lane, next);

    if constexpr (preparation == Preparation::kNorm) {
      static_assert(kWarps == 1, "the norm wants a whole row in one warp");
      apply_norm(r, lane, numbers);
    } else {
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        __half2 pair = __hmul2(numbers.pairs[i], __float2half2_rn(kNormalisation));
        if constexpr (preparation == Preparation::kGelu) {
          const float2 v = __half22float2(pair);
          pair = __floats2half2_rn(eighth_of_gelu(v.x), eighth_of_gelu(v.y));
        }
        numbers.pairs[i] = pair;
      }
    }
    rotate(lane, numbers);

    float largest = largest_of_lane(numbers);
#pragma unroll
    for (int distance = kLanes / 2; distance > 0; distance /= 2) {
      largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, distance));
    }
    if constexpr (kWarps > 1) {
      // All warps of the block treat the same row, so that all reach the barrier.
      static_assert(kWarps == kWarpsOfBlock);
      turn ^= 1;
      largest_of_warp[turn][warp] = largest;
      __syncthreads();
#pragma unroll
      for (int i = 0; i < kWarps; ++i) largest = fmaxf(largest, largest_of_warp[turn][i]);
    }
    largest = fmaxf(largest, kSmallestRow);
    // The scale is rounded to fp16, and the step is what undoes the rounded scale. Rounded down, so
    // that no product exceeds 127.
    const __half scale = __float2half_rd(fminf(kLargestInt8 / largest, kLargestHalf));
    if (lane == 0 && part == 0) r.step[row] = 1.0f / __half2float(scale);
    const __half2 scales = __half2half2(scale);
#pragma unroll
    for (int run = 0; run < kRuns; ++run) {
      const __half2* p = numbers.pairs + 4 * run;
      const uint2 bytes =
          make_uint2(four_int8(p[0], p[1], scales), four_int8(p[2], p[3], scales));
      int8_t* to = r.out + int64_t{row} * kWidth + part + first_column(run, lane);
      *reinterpret_cast<uint2*>(to) = bytes;
    }
  }
}

template <Preparation preparation, int kWarps>
int launch(const Rows& r, int multiprocessors, cudaStream_t stream) {
  constexpr int kRowsOfBlock = kWarpsOfBlock / kWarps;
  const int needed = (r.rows + kRowsOfBlock - 1) / kRowsOfBlock;
  const int blocks = min(needed, kBlocksOfMultiprocessor * multiprocessors);
  round_rows<preparation, kWarps><<<blocks, kThreads, 0, stream>>>(r);
  return static_cast<int>(cudaGetLastError());
}

}  // namespace

// Returns 0, or CUDA's number of an error. It does not wait for the GPU. `preparation` is 0 (none),
// 1 (layer norm) or 2 (exact GELU); `width` is 2,560 or 10,240 (not with a norm).
extern "C" int virnuc_int8_rows(const void* x, const void* weight, const void* bias, void* out,
                                float* step, int rows, int width, float eps, int preparation,
                                int multiprocessors, cudaStream_t stream) {
  Rows r{static_cast<const __half*>(x), static_cast<const __half*>(weight),
         static_cast<const __half*>(bias), static_cast<int8_t*>(out), step, rows, eps};
  if (width == kColumnsOfWarp) {
    if (preparation == 1) return launch<Preparation::kNorm, 1>(r, multiprocessors, stream);
    if (preparation == 2) return launch<Preparation::kGelu, 1>(r, multiprocessors, stream);
    return launch<Preparation::kNone, 1>(r, multiprocessors, stream);
  }
  if (width == 4 * kColumnsOfWarp && preparation != 1) {
    if (preparation == 2) return launch<Preparation::kGelu, 4>(r, multiprocessors, stream);
    return launch<Preparation::kNone, 4>(r, multiprocessors, stream);
  }
  return static_cast<int>(cudaErrorInvalidValue);
}
