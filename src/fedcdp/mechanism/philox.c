/* Philox 4x32-10 (Salmon et al., SC 2011) over a grid of rows and columns, and the arithmetic around the logarithms, sines
   and cosines that turn its words into normal values. */

#include <math.h>
#include <stdint.h>

#define AT_ONCE 256 /* columns, few enough to stay in the first-level cache */
#define ROUNDS 10

/* One of the four counters: its value at (row, column) is start[row * by_row + column * by_column]. */
struct counter {
    const int64_t *start;
    int64_t by_row, by_column;
};

/* The four words, 32 bits each, at a place and those after it, which are numbered row by row: at most AT_ONCE of them, all in
   one row. Returns how many. The words are held in 64 bits, because compilers then multiply whole vectors. */
static int64_t draw(uint64_t key, const struct counter counters[4], int64_t columns, int64_t place, int64_t most,
                    uint64_t words[4][AT_ONCE])
{
    const int64_t row = place / columns, first = place % columns;
    int64_t some = columns - first < AT_ONCE ? columns - first : AT_ONCE;
    some = most < some ? most : some;
    for (int each = 0; each < 4; each++) {
        const struct counter counter = counters[each];
        const int64_t *start = counter.start + row * counter.by_row + first * counter.by_column;
        for (int64_t column = 0; column < some; column++)
            words[each][column] = (uint32_t)start[column * counter.by_column];
    }
    for (int64_t column = 0; column < some; column++) {
        uint64_t c0 = words[0][column], c1 = words[1][column], c2 = words[2][column], c3 = words[3][column];
        uint32_t k0 = (uint32_t)key, k1 = (uint32_t)(key >> 32);
        for (int round = 0; round < ROUNDS; round++) {
            const uint64_t p0 = c0 * 0xD2511F53u, p1 = c2 * 0xCD9E8D57u;
            c0 = p1 >> 32 ^ c1 ^ k0;
            c2 = p0 >> 32 ^ c3 ^ k1;
            c1 = (uint32_t)p1;
            c3 = (uint32_t)p0;
            k0 += 0x9E3779B9u;
            k1 += 0xBB67AE85u;
        }
        words[0][column] = c0, words[1][column] = c1, words[2][column] = c2, words[3][column] = c3;
    }
    return some;
}

/* The words of all places of a grid [4, places]. */
void philox(uint64_t key, const struct counter counters[4], int64_t columns, int64_t places, int64_t *restrict into)
{
    uint64_t words[4][AT_ONCE];
    for (int64_t place = 0, some; place < places; place += some) {
        some = draw(key, counters, columns, place, places - place, words);
        for (int each = 0; each < 4; each++)
            for (int64_t column = 0; column < some; column++)
                into[each * places + place + column] = (int64_t)words[each][column];
    }
}

/* The words of some places as uniform numbers in (0, 1], the first and third, and as angles, the second and fourth: [2, places]. */
void uniforms(uint64_t key, const struct counter counters[4], int64_t columns, int64_t begin, int64_t places, float turn,
              float *restrict unit, float *restrict angle)
{
    uint64_t words[4][AT_ONCE];
    for (int64_t place = 0, some; place < places; place += some) {
        some = draw(key, counters, columns, begin + place, places - place, words);
        for (int pair = 0; pair < 2; pair++)
            for (int64_t column = 0; column < some; column++) {
                unit[pair * places + place + column] = ((float)(uint32_t)words[2 * pair][column] + 0.5f) * 0x1p-32f;
                angle[pair * places + place + column] = (float)(uint32_t)words[2 * pair + 1][column] * turn;
            }
    }
}

/* √(−2·logarithm)·(cosine, sine) of two pairs [2, places], as [places, 4]. */
void normals(int64_t places, const float *restrict logarithm, const float *restrict cosine, const float *restrict sine,
             float *restrict into)
{
    for (int64_t place = 0; place < places; place++) {
        const float one = sqrtf(-2.0f * logarithm[place]), two = sqrtf(-2.0f * logarithm[places + place]);
        into[4 * place] = one * cosine[place];
        into[4 * place + 1] = one * sine[place];
        into[4 * place + 2] = two * cosine[places + place];
        into[4 * place + 3] = two * sine[places + place];
    }
}
