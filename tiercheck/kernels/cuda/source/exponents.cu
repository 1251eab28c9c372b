// Lossless coding of exponents in few bits: codes relative to their block's highest exponent, and behind them the
// exponents without a code.
//
// A warp takes a block; lane l holds its elements l, l + 32, l + 64, ... Their codes fill three bytes of the packed
// codes. A tile has one block for each warp, and a scan over tiles computes the position of each stored exponent.
#include "scan.cuh"

namespace {

constexpr u32 BLOCK = 256;
constexpr u32 ROWS = BLOCK / LANES;
constexpr u32 CODE_BYTES = BLOCK * 3 / 8;
constexpr u32 CODED = 7;                        // exponents with a code, from the highest one down
constexpr u32 STORED = 7;                       // the code of every other exponent

EITHER u64 blocks_of(u64 size) { return (size + BLOCK - 1) / BLOCK; }

EITHER u32 code_of(u8 exponent, u8 highest) {
    const u8 below = u8(highest - exponent);
    return below < CODED ? below : STORED;
}

// A lane's bytes of a block's codes: bytes l and l + 32 have the low two bits of every other row, byte l + 64 the high
// bits.
struct LaneCodes {
    u8 bytes[3];

    EITHER void put(u32 row, u32 code) {
        bytes[row % 2] |= u8((code & 3) << row / 2 * 2);
        bytes[2] |= u8((code >> 2) << row);
    }
    EITHER u32 get(u32 row) const { return (bytes[row % 2] >> row / 2 * 2 & 3) | (bytes[2] >> row & 1) << 2; }
};

// Called by a whole warp: of the block's largest exponent and the six below it, the largest with which the fewest
// exponents are stored.
__device__ __forceinline__ u8 highest_of(const u8 (&exponents)[ROWS]) {
    u32 largest = 0;
#pragma unroll
    for (u32 row = 0; row < ROWS; row++) largest = exponents[row] > largest ? exponents[row] : largest;
    largest = largest_over_warp(largest);
    u8 chosen = 0;
    u32 fewest = BLOCK + 1;
    for (u32 lower = 0; lower < CODED; lower++) {
        const u8 candidate = u8(largest - lower);
        u32 stored = 0;
#pragma unroll
        for (u32 row = 0; row < ROWS; row++) stored += code_of(exponents[row], candidate) == STORED;
        stored = sum_over_warp(stored);
        if (stored < fewest) {
            chosen = candidate;
            fewest = stored;
        }
    }
    return chosen;
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS) pack_exponents(
    const u8 *exponents, u64 size, u8 *packed, u64 *length, u32 *ticket, u64 *states) {
    SHARED(Scan, scan);
    const u32 lane = threadIdx.x % LANES, tile = next_tile(scan, ticket);
    const u64 blocks = blocks_of(size), block = u64(tile) * WARPS + threadIdx.x / LANES;
    u8 own[ROWS] = {}, highest = 0;
    u32 of_warp = 0;
    if (block < blocks) {
#pragma unroll
        for (u32 row = 0; row < ROWS; row++) {
            const u64 at = block * BLOCK + row * LANES + lane;
            own[row] = exponents[at < size ? at : size - 1];
        }
        highest = highest_of(own);
        LaneCodes codes = {};
#pragma unroll
        for (u32 row = 0; row < ROWS; row++) {
            const u32 code = code_of(own[row], highest);
            codes.put(row, code);
            of_warp += __popc(__ballot_sync(WHOLE_WARP, code == STORED));
        }
        if (lane == 0) packed[block] = highest;
#pragma unroll
        for (u32 third = 0; third < 3; third++)
            packed[blocks + block * CODE_BYTES + third * LANES + lane] = codes.bytes[third];
    }

    const Counted found = counted(scan, states, tile, of_warp);
    const u64 behind_codes = blocks * (1 + CODE_BYTES);
    if (threadIdx.x == 0 && u64(tile + 1) * WARPS >= blocks) *length = behind_codes + found.so_far;
    u64 position = behind_codes + found.before_warp;
    if (block >= blocks) return;
#pragma unroll
    for (u32 row = 0; row < ROWS; row++) {
        const u32 stored = __ballot_sync(WHOLE_WARP, code_of(own[row], highest) == STORED);  // one bit for each lane
        if (stored >> lane & 1) packed[position + lanes_before(stored, lane)] = own[row];
        position += __popc(stored);
    }
}

// If more codes stand for stored exponents than there are stored exponents, the others decode to `highest - STORED`.
extern "C" __global__ void __launch_bounds__(THREADS) unpack_exponents(
    const u8 *packed, u64 packed_size, u8 *exponents, u64 size, u32 *count, u32 *ticket, u64 *states) {
    SHARED(Scan, scan);
    const u32 lane = threadIdx.x % LANES, tile = next_tile(scan, ticket);
    const u64 blocks = blocks_of(size), block = u64(tile) * WARPS + threadIdx.x / LANES;
    u8 highest = 0;
    LaneCodes codes = {};
    u32 stored[ROWS] = {};                      // one bit for each lane
    u32 of_warp = 0;
    if (block < blocks) {
        highest = packed[block];
#pragma unroll
        for (u32 third = 0; third < 3; third++)
            codes.bytes[third] = packed[blocks + block * CODE_BYTES + third * LANES + lane];
#pragma unroll
        for (u32 row = 0; row < ROWS; row++) {
            stored[row] = __ballot_sync(WHOLE_WARP, codes.get(row) == STORED);
            of_warp += __popc(stored[row]);
        }
    }

    const Counted found = counted(scan, states, tile, of_warp);
    if (threadIdx.x == 0 && u64(tile + 1) * WARPS >= blocks) *count = found.so_far;
    u64 position = blocks * (1 + CODE_BYTES) + found.before_warp;
#pragma unroll
    for (u32 row = 0; row < ROWS; row++) {
        const u64 at = block * BLOCK + row * LANES + lane, from = position + lanes_before(stored[row], lane);
        const u32 code = codes.get(row);
        if (at < size) exponents[at] = code == STORED && from < packed_size ? packed[from] : u8(highest - code);
        position += __popc(stored[row]);
    }
}
