// Causal attention on tensor cores, after FlashAttention-2 (https://arxiv.org/abs/2307.08691).
// Before this text stand (see source() in mod.rs) macros:
//   HEAD: elements of a head, a multiple of 8 up to 128;
//   FORWARD, BACKWARD_QUERIES, BACKWARD_KEYS: whether there is this kernel, 0 or 1;
//   DOCUMENTS, WINDOW, DROPOUT: whether there are some, 0 or 1.
//
// Four warps of a block share tiles of rows in shared memory. A product is mma.m16n8k16: of a
// 16×8 tile of sums, lane l holds rows l/4 and l/4 + 8, columns 2·(l%4) and the next one; the
// same places of two neighbouring tiles make a left factor of 16×16, so probabilities go from one
// product into the next without leaving their registers.
//
// qkv: [b, s, width] with width = (heads + 2·groups)·HEAD: query heads, key heads, value heads.

typedef unsigned int u32;
typedef unsigned short half_t;  // the bits of a bf16

struct Info {
    u32 s, heads, groups;
    float scale;
    u32 window;  // keys that a query sees, itself included
    // Of dropout: number of the first sample, step, key and threshold of zeropp_kernels::dropout.
    u32 sample, step, key_low, key_high, threshold;
    float kept;
};

constexpr int WARPS = 4, THREADS = 32 * WARPS;
constexpr int WIDE = (HEAD + 15) / 16 * 16;  // with zeros up to whole tiles
constexpr int STEPS = WIDE / 16, TILES = WIDE / 8;
// Eight rows' 16 bytes of one column lie in different banks: mixed by the row, or the row is odd.
constexpr bool MIXED = WIDE % 64 == 0;
constexpr int PITCH = 2 * WIDE + (MIXED ? 0 : 16);
// Rows of the tiles that a loop walks over; all tiles of a kernel fit into 48 KB.
constexpr int ROWS = WIDE > 64 ? 32 : 64;
// Blocks on a multiprocessor that registers are kept for: measured on an H200, 6 % of a layer's
// attention in heads of 64.
constexpr int BLOCKS_LEAST = WIDE > 64 ? 2 : 3;
constexpr float LOG2E = 1.4426950408889634f, LN2 = 0.6931471805599453f;
#define NOTHING (-__int_as_float(0x7f800000))

// --- Instructions --------------------------------------------------------------------------------

__device__ __forceinline__ u32 address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// 16 bytes into shared memory, or zeros.
__device__ __forceinline__ void fetch16(u32 to, const void* from, bool there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
                 "r"(there ? 16 : 0) : "memory");
}

__device__ __forceinline__ void fetch4(u32 to, const void* from, bool there) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from),
                 "r"(there ? 4 : 0) : "memory");
}

__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits for all but the newest `LEFT` groups of this thread, then for all threads.
template <int LEFT>
__device__ __forceinline__ void arrive() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
    __syncthreads();
}

__device__ __forceinline__ void four(u32 (&r)[4], u32 at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at) : "memory");
}

__device__ __forceinline__ void four_turned(u32 (&r)[4], u32 at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at) : "memory");
}

__device__ __forceinline__ void multiply(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ float power_of_2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Two bf16, `low` first in memory.
__device__ __forceinline__ u32 pair(float low, float high) {
    u32 y;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    return y;
}

__device__ __forceinline__ float low(u32 x) { return __int_as_float(x << 16); }
__device__ __forceinline__ float high(u32 x) { return __int_as_float(x & 0xFFFF0000u); }

// --- Tiles in shared memory ----------------------------------------------------------------------

// Where the `chunk`-th 16 bytes of a row lie in a tile.
__device__ __forceinline__ u32 place(u32 row, u32 chunk) {
    return row * PITCH + (MIXED ? chunk ^ (row & 7) : chunk) * 16;
}

// COUNT rows from `first` on of a matrix with `stride` elements from row to row into a tile; zeros
// from row `end` on.
template <int COUNT>
__device__ __forceinline__ void fetch_rows(u32 tile, const half_t* from, u32 stride, u32 first,
                                           u32 end) {
    constexpr int CHUNKS = WIDE / 8;
#pragma unroll
    for (int i = 0; i < COUNT * CHUNKS / THREADS + (COUNT * CHUNKS % THREADS != 0); i++) {
        u32 n = i * THREADS + threadIdx.x, row = n / CHUNKS, chunk = n % CHUNKS;
        if (COUNT * CHUNKS % THREADS != 0 && row >= COUNT) break;
        bool there = first + row < end && (WIDE == HEAD || chunk < HEAD / 8);
        const half_t* source = there ? from + (size_t)(first + row) * stride + chunk * 8 : from;
        fetch16(tile + place(row, chunk), source, there);
    }
}

// Numbers of COUNT queries.
template <int COUNT>
__device__ __forceinline__ void fetch_numbers(u32 to, const void* from, u32 first, u32 end) {
    if (threadIdx.x < COUNT) {
        bool there = first + threadIdx.x < end;
        const char* source = (const char*)from + (there ? 4 * (size_t)(first + threadIdx.x) : 0);
        fetch4(to + 4 * threadIdx.x, source, there);
    }
}

// A left factor: 16 rows from `row` on, columns 16·step on.
__device__ __forceinline__ void left(u32 (&r)[4], u32 tile, u32 row, u32 step) {
    u32 lane = threadIdx.x % 32;
    four(r, tile + place(row + lane % 16, 2 * step + lane / 16));
}

// A right factor of two tiles whose columns are 16 rows in memory from `row` on: for products with
// the transpose, summed over columns 16·step on.
__device__ __forceinline__ void right_of_rows(u32 (&r)[4], u32 tile, u32 row, u32 step) {
    u32 lane = threadIdx.x % 32;
    four(r, tile + place(row + lane % 8 + lane / 16 * 8, 2 * step + lane / 8 % 2));
}

// A right factor of two tiles, summed over 16 rows in memory from `row` on, of columns 16·step on.
__device__ __forceinline__ void right(u32 (&r)[4], u32 tile, u32 row, u32 step) {
    u32 lane = threadIdx.x % 32;
    four_turned(r, tile + place(row + lane % 16, 2 * step + lane / 16));
}

// Two tiles of sums side by side as a left factor.
__device__ __forceinline__ void as_left(u32 (&r)[4], const float (&a)[4], const float (&b)[4]) {
    r[0] = pair(a[0], a[1]);
    r[1] = pair(a[2], a[3]);
    r[2] = pair(b[0], b[1]);
    r[3] = pair(b[2], b[3]);
}

// A warp's 16 rows of sums times `factor0` (rows l/4) and `factor1` (the others) from row `row` of
// a tile on, whose rows nobody else uses, to rows from `first` on in memory, below `end`.
__device__ __forceinline__ void store_rows(const float (&sums)[TILES][4], float factor0,
                                           float factor1, unsigned char* tile, u32 row,
                                           half_t* to, u32 stride, u32 first, u32 end) {
    u32 lane = threadIdx.x % 32;
    __syncwarp();
#pragma unroll
    for (int n = 0; n < TILES; n++) {
        u32 column = lane % 4 * 4;
        *(u32*)(tile + place(row + lane / 4, n) + column) =
            pair(sums[n][0] * factor0, sums[n][1] * factor0);
        *(u32*)(tile + place(row + lane / 4 + 8, n) + column) =
            pair(sums[n][2] * factor1, sums[n][3] * factor1);
    }
    __syncwarp();
    constexpr int CHUNKS = HEAD / 8;
    for (u32 n = lane; n < 16 * CHUNKS; n += 32) {
        u32 r = n / CHUNKS, chunk = n % CHUNKS;
        if (first + r < end) {
            *(uint4*)(to + (size_t)(first + r) * stride + chunk * 8) =
                *(const uint4*)(tile + place(row + r, chunk));
        }
    }
}

// --- Hidden keys ---------------------------------------------------------------------------------

#define HIDDEN (DOCUMENTS || WINDOW)

// The first key that a query sees, which never goes down within a sample: of its document, of
// which it is the `position`-th token, and of its window.
__device__ __forceinline__ u32 first_key(const Info& info, u32 query, u32 position) {
    u32 before = DOCUMENTS ? position : query;
    if (WINDOW) before = min(before, info.window - 1);
    return query - before;
}

// The same, where `positions` are those of a sample.
__device__ __forceinline__ u32 first_key(const Info& info, const int* positions, u32 query) {
    return query < info.s ? first_key(info, query, DOCUMENTS ? positions[query] : 0) : 0;
}

#if DOCUMENTS
#define POSITIONS const int *__restrict__ positions,
#define OF_SAMPLE (positions + (size_t)b * s)
#else
#define POSITIONS
#define OF_SAMPLE ((const int*)nullptr)
#endif

// --- Dropout -------------------------------------------------------------------------------------

#if DROPOUT
// The factor of a probability: a word of Philox4x32-10 at counters (lane of the key, row, sample,
// step), as zeropp_kernels::dropout has it.
__device__ __forceinline__ float factor(const Info& info, u32 query, u32 head, u32 b, u32 key) {
    u32 c0 = key / 64 * 16 + key % 16, c1 = query * info.heads + head;
    u32 c2 = info.sample + b, c3 = info.step, k0 = info.key_low, k1 = info.key_high;
#pragma unroll
    for (int i = 0; i < 10; i++) {
        u32 even = __umulhi(0xCD9E8D57u, c2) ^ c1 ^ k0, odd = __umulhi(0xD2511F53u, c0) ^ c3 ^ k1;
        c1 = 0xCD9E8D57u * c2;
        c3 = 0xD2511F53u * c0;
        c0 = even;
        c2 = odd;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    u32 which = key / 16 % 4;
    u32 word = which == 0 ? c0 : which == 1 ? c1 : which == 2 ? c2 : c3;
    return word < info.threshold ? 0.0f : info.kept;
}
#endif

// --- Forward -------------------------------------------------------------------------------------

#if FORWARD
// A block has 128 queries of a head, a warp 32 of them, and walks over the keys.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_LEAST)
attention_forward(const half_t* __restrict__ qkv, half_t* __restrict__ out,
                  float* __restrict__ logs,
                  POSITIONS const __grid_constant__ Info info) {
    constexpr int QUERIES = 128, PARTS = 2;
    __shared__ __align__(128) unsigned char room[(QUERIES + 2 * ROWS) * PITCH];
    const u32 q_tile = address(room), k_tile = q_tile + QUERIES * PITCH;
    const u32 v_tile = k_tile + ROWS * PITCH;
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    // The longest first.
    const u32 query0 = (gridDim.x - 1 - blockIdx.x) * QUERIES, head = blockIdx.y, b = blockIdx.z;
    const u32 s = info.s, stride = (info.heads + 2 * info.groups) * HEAD;
    const u32 group = head / (info.heads / info.groups);
    const half_t* sample = qkv + (size_t)b * s * stride;
    const half_t* k = sample + (info.heads + group) * HEAD;
    const half_t* v = k + info.groups * HEAD;
    const u32 rows0 = query0 + warp * 16 * PARTS, row0 = rows0 + lane / 4;

    u32 key0 = 0;
    const u32 end = min(s, query0 + QUERIES);
#if HIDDEN
    key0 = first_key(info, OF_SAMPLE, query0) / ROWS * ROWS;
    u32 seen[2 * PARTS];
#pragma unroll
    for (int i = 0; i < 2 * PARTS; i++) seen[i] = first_key(info, OF_SAMPLE, row0 + 8 * i);
#endif
    fetch_rows<QUERIES>(q_tile, sample + head * HEAD, stride, query0, s);
    fetch_rows<ROWS>(k_tile, k, stride, key0, s);
    commit();

    float sums[PARTS][TILES][4] = {};
    float top[2 * PARTS], total[2 * PARTS];
#pragma unroll
    for (int i = 0; i < 2 * PARTS; i++) top[i] = NOTHING, total[i] = 0.0f;
    const float to_log2 = info.scale * LOG2E;

    for (; key0 < end; key0 += ROWS) {
        arrive<0>();  // keys are here, and nobody reads the last values any more
        fetch_rows<ROWS>(v_tile, v, stride, key0, s);
        commit();
        const bool sees = key0 < rows0 + 16 * PARTS;
        float p[PARTS][ROWS / 8][4] = {};
        if (sees) {
#pragma unroll
            for (int step = 0; step < STEPS; step++) {
                u32 q[PARTS][4];
#pragma unroll
                for (int part = 0; part < PARTS; part++)
                    left(q[part], q_tile, (warp * PARTS + part) * 16, step);
#pragma unroll
                for (int n = 0; n < ROWS / 16; n++) {
                    u32 keys[4];
                    right_of_rows(keys, k_tile, n * 16, step);
#pragma unroll
                    for (int part = 0; part < PARTS; part++) {
                        multiply(p[part][2 * n], q[part], keys[0], keys[1]);
                        multiply(p[part][2 * n + 1], q[part], keys[2], keys[3]);
                    }
                }
            }
        }
        arrive<0>();  // values are here, and nobody reads the keys any more
        if (key0 + ROWS < end) fetch_rows<ROWS>(k_tile, k, stride, key0 + ROWS, s);
        commit();
        if (!sees) continue;

        if (HIDDEN || key0 + ROWS > rows0 + 1) {
#pragma unroll
            for (int part = 0; part < PARTS; part++)
#pragma unroll
                for (int n = 0; n < ROWS / 8; n++)
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        u32 key = key0 + n * 8 + lane % 4 * 2 + i % 2;
                        bool hidden = key > row0 + 16 * part + i / 2 * 8;
#if HIDDEN
                        hidden |= key < seen[2 * part + i / 2];
#endif
                        if (hidden) p[part][n][i] = NOTHING;
                    }
        }
#pragma unroll
        for (int row = 0; row < 2 * PARTS; row++) {
            const int part = row / 2, at = row % 2 * 2;
            float most = top[row];
#pragma unroll
            for (int n = 0; n < ROWS / 8; n++)
                most = fmaxf(most, fmaxf(p[part][n][at], p[part][n][at + 1]));
            most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
            most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
            // A row that has seen no key yet stays at zero.
            const float base = most == NOTHING ? 0.0f : most * to_log2;
            const float before = power_of_2(top[row] * to_log2 - base);
            top[row] = most;
            float sum = 0.0f;
#pragma unroll
            for (int n = 0; n < ROWS / 8; n++)
#pragma unroll
                for (int i = at; i < at + 2; i++) {
                    p[part][n][i] = power_of_2(p[part][n][i] * to_log2 - base);
                    sum += p[part][n][i];
                }
            total[row] = total[row] * before + sum;
#pragma unroll
            for (int n = 0; n < TILES; n++) {
                sums[part][n][at] *= before;
                sums[part][n][at + 1] *= before;
            }
        }
#if DROPOUT
#pragma unroll
        for (int part = 0; part < PARTS; part++)
#pragma unroll
            for (int n = 0; n < ROWS / 8; n++)
#pragma unroll
                for (int i = 0; i < 4; i++)
                    p[part][n][i] *= factor(info, row0 + 16 * part + i / 2 * 8, head, b,
                                            key0 + n * 8 + lane % 4 * 2 + i % 2);
#endif
#pragma unroll
        for (int n = 0; n < ROWS / 16; n++) {
            u32 left_p[PARTS][4];
#pragma unroll
            for (int part = 0; part < PARTS; part++)
                as_left(left_p[part], p[part][2 * n], p[part][2 * n + 1]);
#pragma unroll
            for (int step = 0; step < STEPS; step++) {
                u32 values[4];
                right(values, v_tile, n * 16, step);
#pragma unroll
                for (int part = 0; part < PARTS; part++) {
                    multiply(sums[part][2 * step], left_p[part], values[0], values[1]);
                    multiply(sums[part][2 * step + 1], left_p[part], values[2], values[3]);
                }
            }
        }
    }

    const u32 out_stride = info.heads * HEAD;
    half_t* to = out + (size_t)b * s * out_stride + head * HEAD;
    float inverse[2 * PARTS];
#pragma unroll
    for (int row = 0; row < 2 * PARTS; row++) {
        float sum = total[row];
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        inverse[row] = 1.0f / sum;
        const u32 query = row0 + 8 * row;
        if (lane % 4 == 0 && query < s)
            logs[((size_t)b * info.heads + head) * s + query] =
                top[row] * info.scale + LN2 * __log2f(sum);
    }
    // A warp alone has read its queries' tile.
#pragma unroll
    for (int part = 0; part < PARTS; part++)
        store_rows(sums[part], inverse[2 * part], inverse[2 * part + 1], room,
                   (warp * PARTS + part) * 16, to, out_stride, rows0 + 16 * part, s);
}
#endif

// --- Backward ------------------------------------------------------------------------------------

#if BACKWARD_QUERIES
// The gradient of the queries, and the sums of out·dout of each query for the other kernel. A
// block has 64 queries of a head, a warp 16 of them, and walks over the keys.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_LEAST)
attention_backward_queries(const half_t* __restrict__ qkv, const half_t* __restrict__ out,
                           const half_t* __restrict__ dout, const float* __restrict__ logs,
                           half_t* __restrict__ dqkv, float* __restrict__ means,
                           POSITIONS const __grid_constant__ Info info) {
    constexpr int QUERIES = 64;
    __shared__ __align__(128) unsigned char room[4 * ROWS * PITCH];
    const u32 tiles = address(room);
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const u32 query0 = (gridDim.x - 1 - blockIdx.x) * QUERIES, head = blockIdx.y, b = blockIdx.z;
    const u32 s = info.s, stride = (info.heads + 2 * info.groups) * HEAD;
    const u32 out_stride = info.heads * HEAD;
    const u32 group = head / (info.heads / info.groups);
    const half_t* sample = qkv + (size_t)b * s * stride;
    const half_t* k = sample + (info.heads + group) * HEAD;
    const half_t* v = k + info.groups * HEAD;
    const size_t of_head = ((size_t)b * info.heads + head) * s;
    const size_t of_out = (size_t)b * s * out_stride + head * HEAD;
    const u32 rows0 = query0 + warp * 16, row0 = rows0 + lane / 4;

    // Queries and dout stay in registers; out is read once.
    u32 q[STEPS][4], dy[STEPS][4];
    const u32 second = tiles + QUERIES * PITCH;
    fetch_rows<QUERIES>(tiles, sample + head * HEAD, stride, query0, s);
    fetch_rows<QUERIES>(second, dout + of_out, out_stride, query0, s);
    commit();
    arrive<0>();
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
        left(q[step], tiles, warp * 16, step);
        left(dy[step], second, warp * 16, step);
    }
    __syncthreads();
    fetch_rows<QUERIES>(tiles, out + of_out, out_stride, query0, s);
    commit();
    arrive<0>();
    float mean[2] = {0.0f, 0.0f}, log2_sum[2];
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
        u32 y[4];
        left(y, tiles, warp * 16, step);
#pragma unroll
        for (int i = 0; i < 4; i++)
            mean[i % 2] += low(y[i]) * low(dy[step][i]) + high(y[i]) * high(dy[step][i]);
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        mean[i] += __shfl_xor_sync(~0u, mean[i], 1);
        mean[i] += __shfl_xor_sync(~0u, mean[i], 2);
        const u32 query = row0 + 8 * i;
        log2_sum[i] = query < s ? logs[of_head + query] * LOG2E : 0.0f;
        if (lane % 4 == 0 && query < s) means[of_head + query] = mean[i];
    }
    __syncthreads();

    u32 key0 = 0, stage = 0;
    const u32 end = min(s, query0 + QUERIES);
#if HIDDEN
    key0 = first_key(info, OF_SAMPLE, query0) / ROWS * ROWS;
    u32 seen[2];
#pragma unroll
    for (int i = 0; i < 2; i++) seen[i] = first_key(info, OF_SAMPLE, row0 + 8 * i);
#endif
    fetch_rows<ROWS>(tiles, k, stride, key0, s);
    fetch_rows<ROWS>(tiles + ROWS * PITCH, v, stride, key0, s);
    commit();
    float dq[TILES][4] = {};
    const float to_log2 = info.scale * LOG2E;
    for (; key0 < end; key0 += ROWS, stage ^= 1) {
        arrive<0>();
        if (key0 + ROWS < end) {
            const u32 next = tiles + (stage ^ 1) * 2 * ROWS * PITCH;
            fetch_rows<ROWS>(next, k, stride, key0 + ROWS, s);
            fetch_rows<ROWS>(next + ROWS * PITCH, v, stride, key0 + ROWS, s);
        }
        commit();
        const u32 k_tile = tiles + stage * 2 * ROWS * PITCH, v_tile = k_tile + ROWS * PITCH;
#pragma unroll
        for (int block = 0; block < ROWS / 32; block++) {
            const u32 from = key0 + 32 * block;
            if (from >= rows0 + 16) continue;
            float p[4][4] = {}, dp[4][4] = {};
#pragma unroll
            for (int step = 0; step < STEPS; step++)
#pragma unroll
                for (int n = 0; n < 2; n++) {
                    u32 r[4];
                    right_of_rows(r, k_tile, 32 * block + 16 * n, step);
                    multiply(p[2 * n], q[step], r[0], r[1]);
                    multiply(p[2 * n + 1], q[step], r[2], r[3]);
                    right_of_rows(r, v_tile, 32 * block + 16 * n, step);
                    multiply(dp[2 * n], dy[step], r[0], r[1]);
                    multiply(dp[2 * n + 1], dy[step], r[2], r[3]);
                }
            if (HIDDEN || from + 32 > rows0 + 1) {
#pragma unroll
                for (int n = 0; n < 4; n++)
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        const u32 key = from + n * 8 + lane % 4 * 2 + i % 2;
                        bool hidden = key > row0 + i / 2 * 8;
#if HIDDEN
                        hidden |= key < seen[i / 2];
#endif
                        if (hidden) p[n][i] = NOTHING;
                    }
            }
#pragma unroll
            for (int n = 0; n < 4; n++)
#pragma unroll
                for (int i = 0; i < 4; i++) {
#if DROPOUT
                    dp[n][i] *= factor(info, row0 + i / 2 * 8, head, b,
                                       from + n * 8 + lane % 4 * 2 + i % 2);
#endif
                    const float value = power_of_2(p[n][i] * to_log2 - log2_sum[i / 2]);
                    dp[n][i] = value * (dp[n][i] - mean[i / 2]);
                }
#pragma unroll
            for (int n = 0; n < 2; n++) {
                u32 ds[4];
                as_left(ds, dp[2 * n], dp[2 * n + 1]);
#pragma unroll
                for (int step = 0; step < STEPS; step++) {
                    u32 r[4];
                    right(r, k_tile, 32 * block + 16 * n, step);
                    multiply(dq[2 * step], ds, r[0], r[1]);
                    multiply(dq[2 * step + 1], ds, r[2], r[3]);
                }
            }
        }
    }
    __syncthreads();
    half_t* to = dqkv + (size_t)b * s * stride + head * HEAD;
    store_rows(dq, info.scale, info.scale, room, warp * 16, to, stride, rows0, s);
}
#endif

#if BACKWARD_KEYS
// The gradients of keys and values. A block has 64 keys of a group, a warp 16 of them, and walks
// over the queries of all heads of the group: sums have one order, and nothing is added in memory.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_LEAST)
attention_backward_keys(const half_t* __restrict__ qkv, const half_t* __restrict__ dout,
                        const float* __restrict__ logs, const float* __restrict__ means,
                        half_t* __restrict__ dqkv,
                        POSITIONS const __grid_constant__ Info info) {
    constexpr int KEYS = 64;
    __shared__ __align__(128) unsigned char room[4 * ROWS * PITCH];
    constexpr int NUMBERS = 2 + DOCUMENTS;
    __shared__ float numbers[2][NUMBERS][ROWS];
    const u32 tiles = address(room), first_number = address(numbers);
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const u32 key0 = blockIdx.x * KEYS, group = blockIdx.y, b = blockIdx.z;
    const u32 s = info.s, stride = (info.heads + 2 * info.groups) * HEAD;
    const u32 out_stride = info.heads * HEAD, share = info.heads / info.groups;
    const half_t* sample = qkv + (size_t)b * s * stride;
    const u32 of_k = (info.heads + group) * HEAD, of_v = of_k + info.groups * HEAD;
    const u32 keys0 = key0 + warp * 16;

    u32 k[STEPS][4], v[STEPS][4];
    const u32 second = tiles + KEYS * PITCH;
    fetch_rows<KEYS>(tiles, sample + of_k, stride, key0, s);
    fetch_rows<KEYS>(second, sample + of_v, stride, key0, s);
    commit();
    arrive<0>();
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
        left(k[step], tiles, warp * 16, step);
        left(v[step], second, warp * 16, step);
    }
    __syncthreads();

    const u32 query_start = key0 / ROWS * ROWS;
    u32 end = s;
#if HIDDEN
    // The first query that sees none of these keys ends the walk.
    for (u32 from = key0; from < end;) {
        const u32 middle = (from + end) / 2;
        if (first_key(info, OF_SAMPLE, middle) < key0 + KEYS) from = middle + 1;
        else end = middle;
    }
#endif
    auto fetch = [&](u32 stage, u32 head, u32 query0) {
        const u32 tile = tiles + stage * 2 * ROWS * PITCH;
        const half_t* dy = dout + (size_t)b * s * out_stride + head * HEAD;
        const size_t of_head = ((size_t)b * info.heads + head) * s;
        fetch_rows<ROWS>(tile, sample + head * HEAD, stride, query0, s);
        fetch_rows<ROWS>(tile + ROWS * PITCH, dy, out_stride, query0, s);
        const u32 to = first_number + stage * NUMBERS * ROWS * 4;
        fetch_numbers<ROWS>(to, logs + of_head, query0, s);
        fetch_numbers<ROWS>(to + ROWS * 4, means + of_head, query0, s);
        if (DOCUMENTS) fetch_numbers<ROWS>(to + ROWS * 8, OF_SAMPLE, query0, s);
    };

    float dk[TILES][4] = {}, dv[TILES][4] = {};
    const float to_log2 = info.scale * LOG2E;
    u32 stage = 0, head = group * share, query0 = query_start;
    const u32 last_head = head + share;
    fetch(0, head, query0);
    commit();
    while (head < last_head) {
        arrive<0>();
        u32 next_head = head, next_query = query0 + ROWS;
        if (next_query >= end) next_head++, next_query = query_start;
        if (next_head < last_head) fetch(stage ^ 1, next_head, next_query);
        commit();
        const u32 q_tile = tiles + stage * 2 * ROWS * PITCH, dy_tile = q_tile + ROWS * PITCH;
#pragma unroll 1
        for (int block = 0; block < ROWS; block += 16) {
            if (query0 + block + 16 <= keys0) continue;
            float p[2][4] = {}, dp[2][4] = {};
#pragma unroll
            for (int step = 0; step < STEPS; step++) {
                u32 r[4];
                right_of_rows(r, q_tile, block, step);
                multiply(p[0], k[step], r[0], r[1]);
                multiply(p[1], k[step], r[2], r[3]);
                right_of_rows(r, dy_tile, block, step);
                multiply(dp[0], v[step], r[0], r[1]);
                multiply(dp[1], v[step], r[2], r[3]);
            }
            const u32 from = query0 + block;
            if (HIDDEN || from < keys0 + 15) {
#pragma unroll
                for (int n = 0; n < 2; n++)
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        const u32 at = n * 8 + lane % 4 * 2 + i % 2;
                        const u32 key = keys0 + lane / 4 + i / 2 * 8;
                        bool hidden = key > from + at;
#if HIDDEN
                        const float position = numbers[stage][NUMBERS - 1][block + at];
                        hidden |= key < first_key(info, from + at, __float_as_int(position));
#endif
                        if (hidden) p[n][i] = NOTHING;
                    }
            }
#pragma unroll
            for (int n = 0; n < 2; n++)
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const u32 at = block + n * 8 + lane % 4 * 2 + i % 2;
                    const float value =
                        power_of_2(p[n][i] * to_log2 - numbers[stage][0][at] * LOG2E);
                    float given = dp[n][i];
                    p[n][i] = value;
#if DROPOUT
                    const float by =
                        factor(info, query0 + at, head, b, keys0 + lane / 4 + i / 2 * 8);
                    given *= by;
                    p[n][i] *= by;
#endif
                    dp[n][i] = value * (given - numbers[stage][1][at]);
                }
            u32 left_p[4], left_ds[4];
            as_left(left_p, p[0], p[1]);
            as_left(left_ds, dp[0], dp[1]);
#pragma unroll
            for (int step = 0; step < STEPS; step++) {
                u32 r[4];
                right(r, dy_tile, block, step);
                multiply(dv[2 * step], left_p, r[0], r[1]);
                multiply(dv[2 * step + 1], left_p, r[2], r[3]);
                right(r, q_tile, block, step);
                multiply(dk[2 * step], left_ds, r[0], r[1]);
                multiply(dk[2 * step + 1], left_ds, r[2], r[3]);
            }
        }
        head = next_head;
        query0 = next_query;
        stage ^= 1;
    }
    __syncthreads();
    half_t* to = dqkv + (size_t)b * s * stride;
    store_rows(dk, info.scale, info.scale, room, warp * 16, to + of_k, stride, keys0, s);
    store_rows(dv, 1.0f, 1.0f, room + KEYS * PITCH, warp * 16, to + of_v, stride, keys0, s);
}
#endif
