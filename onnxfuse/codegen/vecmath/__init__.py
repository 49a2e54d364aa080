"""Vector math: exp, log, erf ... for f32 and f64, scalars and vectors through the same code, without library calls.

Method: range reduction, then a polynomial. exp, log, log1p, tanh and erf run in the type of the argument; the others
run in f64 (an f32 result is then correctly rounded but for rare near-ties). Special values follow C: NaN in NaN out,
signed zeros kept, poles give signed infinities. Start at `table.py`: `MATH` has the functions, `MAX_ULP` the largest
error of each in units in the last place (tests/codegen/test_vecmath.py samples it).
"""
