// `wgmma` of one step of 32 bytes (k16 in bfloat16, k8 in tf32) for every N up to 144 columns, and 256 (Hopper only;
// PTX ISA 7.8+, "wgmma.mma_async").
// One line per N: the instruction names its accumulators one by one, so the table cannot be a loop.
#pragma once
#include "types.cuh"

namespace narrow {

// D (64 x 8 * BLOCKS, float32, 4 * BLOCKS registers a thread) += A B. `rs`: A (64 x 16) in registers; `ss`: both
// in shared memory. TRANSPOSED_A / _B: the operand lies with its k index outermost, which tf32 does not allow.
template <int BLOCKS>
struct Wgmma;

// clang-format off
#define ACC(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define ACC1 ACC(0)
#define ACC2 ACC1, ACC(4)
#define ACC3 ACC2, ACC(8)
#define ACC4 ACC3, ACC(12)
#define ACC5 ACC4, ACC(16)
#define ACC6 ACC5, ACC(20)
#define ACC7 ACC6, ACC(24)
#define ACC8 ACC7, ACC(28)
#define ACC9 ACC8, ACC(32)
#define ACC10 ACC9, ACC(36)
#define ACC11 ACC10, ACC(40)
#define ACC12 ACC11, ACC(44)
#define ACC13 ACC12, ACC(48)
#define ACC14 ACC13, ACC(52)
#define ACC15 ACC14, ACC(56)
#define ACC16 ACC15, ACC(60)
#define ACC17 ACC16, ACC(64)
#define ACC18 ACC17, ACC(68)
#define ACC19 ACC18, ACC(72)
#define ACC20 ACC19, ACC(76)
#define ACC21 ACC20, ACC(80)
#define ACC22 ACC21, ACC(84)
#define ACC23 ACC22, ACC(88)
#define ACC24 ACC23, ACC(92)
#define ACC25 ACC24, ACC(96)
#define ACC26 ACC25, ACC(100)
#define ACC27 ACC26, ACC(104)
#define ACC28 ACC27, ACC(108)
#define ACC29 ACC28, ACC(112)
#define ACC30 ACC29, ACC(116)
#define ACC31 ACC30, ACC(120)
#define ACC32 ACC31, ACC(124)
#define NAMES1 "%0,%1,%2,%3"
#define NAMES2 NAMES1 ",%4,%5,%6,%7"
#define NAMES3 NAMES2 ",%8,%9,%10,%11"
#define NAMES4 NAMES3 ",%12,%13,%14,%15"
#define NAMES5 NAMES4 ",%16,%17,%18,%19"
#define NAMES6 NAMES5 ",%20,%21,%22,%23"
#define NAMES7 NAMES6 ",%24,%25,%26,%27"
#define NAMES8 NAMES7 ",%28,%29,%30,%31"
#define NAMES9 NAMES8 ",%32,%33,%34,%35"
#define NAMES10 NAMES9 ",%36,%37,%38,%39"
#define NAMES11 NAMES10 ",%40,%41,%42,%43"
#define NAMES12 NAMES11 ",%44,%45,%46,%47"
#define NAMES13 NAMES12 ",%48,%49,%50,%51"
#define NAMES14 NAMES13 ",%52,%53,%54,%55"
#define NAMES15 NAMES14 ",%56,%57,%58,%59"
#define NAMES16 NAMES15 ",%60,%61,%62,%63"
#define NAMES17 NAMES16 ",%64,%65,%66,%67"
#define NAMES18 NAMES17 ",%68,%69,%70,%71"
#define NAMES19 NAMES18 ",%72,%73,%74,%75"
#define NAMES20 NAMES19 ",%76,%77,%78,%79"
#define NAMES21 NAMES20 ",%80,%81,%82,%83"
#define NAMES22 NAMES21 ",%84,%85,%86,%87"
#define NAMES23 NAMES22 ",%88,%89,%90,%91"
#define NAMES24 NAMES23 ",%92,%93,%94,%95"
#define NAMES25 NAMES24 ",%96,%97,%98,%99"
#define NAMES26 NAMES25 ",%100,%101,%102,%103"
#define NAMES27 NAMES26 ",%104,%105,%106,%107"
#define NAMES28 NAMES27 ",%108,%109,%110,%111"
#define NAMES29 NAMES28 ",%112,%113,%114,%115"
#define NAMES30 NAMES29 ",%116,%117,%118,%119"
#define NAMES31 NAMES30 ",%120,%121,%122,%123"
#define NAMES32 NAMES31 ",%124,%125,%126,%127"
#define WGMMA(BLOCKS, SHAPE, O0, O1, O2, O3, O4, O5, O6)                                                              \
    template <> struct Wgmma<BLOCKS> {                                                                               \
        template <int TRANSPOSED_B>                                                                                  \
        static __device__ __forceinline__ void rs(float* d, const u32* a, u64 b, int accumulate) {                   \
            asm volatile("{ .reg .pred p; setp.ne.b32 p, " O5 ", 0;\n"                                               \
                "wgmma.mma_async.sync.aligned.m64" SHAPE "k16.f32.bf16.bf16 {" NAMES##BLOCKS "}, "                   \
                "{" O0 "," O1 "," O2 "," O3 "}, " O4 ", p, 1, 1, " O6 "; }"                                          \
                : ACC##BLOCKS : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate),                 \
                  "n"(TRANSPOSED_B));                                                                                \
        }                                                                                                            \
        template <int TRANSPOSED_A, int TRANSPOSED_B>                                                                \
        static __device__ __forceinline__ void ss(float* d, u64 a, u64 b) {                                          \
            asm volatile("wgmma.mma_async.sync.aligned.m64" SHAPE "k16.f32.bf16.bf16 {" NAMES##BLOCKS "}, "          \
                O0 ", " O1 ", 1, 1, 1, " O2 ", " O3 ";"                                                              \
                : ACC##BLOCKS : "l"(a), "l"(b), "n"(TRANSPOSED_A), "n"(TRANSPOSED_B));                               \
        }                                                                                                            \
        static __device__ __forceinline__ void ss_tf32(float* d, u64 a, u64 b) {                                     \
            asm volatile("wgmma.mma_async.sync.aligned.m64" SHAPE "k8.f32.tf32.tf32 {" NAMES##BLOCKS "}, "           \
                O0 ", " O1 ", 1, 1, 1;" : ACC##BLOCKS : "l"(a), "l"(b));                                             \
        }                                                                                                            \
        static __device__ __forceinline__ void rs_tf32(float* d, const u32* a, u64 b) {                              \
            asm volatile("wgmma.mma_async.sync.aligned.m64" SHAPE "k8.f32.tf32.tf32 {" NAMES##BLOCKS "}, "           \
                "{" O0 "," O1 "," O2 "," O3 "}, " O4 ", 1, 1, 1;"                                                    \
                : ACC##BLOCKS : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                 \
        }                                                                                                            \
    };
WGMMA(1, "n8", "%4", "%5", "%6", "%7", "%8", "%9", "%10")
WGMMA(2, "n16", "%8", "%9", "%10", "%11", "%12", "%13", "%14")
WGMMA(3, "n24", "%12", "%13", "%14", "%15", "%16", "%17", "%18")
WGMMA(4, "n32", "%16", "%17", "%18", "%19", "%20", "%21", "%22")
WGMMA(5, "n40", "%20", "%21", "%22", "%23", "%24", "%25", "%26")
WGMMA(6, "n48", "%24", "%25", "%26", "%27", "%28", "%29", "%30")
WGMMA(7, "n56", "%28", "%29", "%30", "%31", "%32", "%33", "%34")
WGMMA(8, "n64", "%32", "%33", "%34", "%35", "%36", "%37", "%38")
WGMMA(9, "n72", "%36", "%37", "%38", "%39", "%40", "%41", "%42")
WGMMA(10, "n80", "%40", "%41", "%42", "%43", "%44", "%45", "%46")
WGMMA(11, "n88", "%44", "%45", "%46", "%47", "%48", "%49", "%50")
WGMMA(12, "n96", "%48", "%49", "%50", "%51", "%52", "%53", "%54")
WGMMA(13, "n104", "%52", "%53", "%54", "%55", "%56", "%57", "%58")
WGMMA(14, "n112", "%56", "%57", "%58", "%59", "%60", "%61", "%62")
WGMMA(15, "n120", "%60", "%61", "%62", "%63", "%64", "%65", "%66")
WGMMA(16, "n128", "%64", "%65", "%66", "%67", "%68", "%69", "%70")
WGMMA(17, "n136", "%68", "%69", "%70", "%71", "%72", "%73", "%74")
WGMMA(18, "n144", "%72", "%73", "%74", "%75", "%76", "%77", "%78")
WGMMA(32, "n256", "%128", "%129", "%130", "%131", "%132", "%133", "%134")
#undef WGMMA
// clang-format on

}  // namespace narrow
