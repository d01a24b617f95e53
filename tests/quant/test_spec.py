from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tahq.errors import ConfigError
from tahq.quant import CodecSpec, get_codec
from tahq.quant.spec import EdenSpec, FixedSpec, RawSpec, TahSpec, WfSpec


@pytest.mark.parametrize(
    ("text", "spec", "canonical"),
    [
        ("tah", TahSpec(), "tah:group=64,int4=0.8,tau=2,low=3,high=4"),
        ("tah:tau=inf, int4=1/3", TahSpec(tau=float("inf"), int4=Fraction(1, 3)), None),
        ("tah:int4=0.80,group=64", TahSpec(), "tah:group=64,int4=0.8,tau=2,low=3,high=4"),
        ("tah:high=8,low=2,tau=0", TahSpec(low=2, high=8, tau=0.0), "tah:group=64,int4=0.8,tau=0,low=2,high=8"),
        ("tah:alloc=group,select=high,adaptive=on", TahSpec(), "tah:group=64,int4=0.8,tau=2,low=3,high=4"),
        (
            "tah:adaptive=off,alloc=token,select=low",
            TahSpec(alloc="token", select="low", adaptive="off"),
            "tah:group=64,int4=0.8,tau=2,low=3,high=4,alloc=token,select=low,adaptive=off",
        ),
        ("tah:alloc=128", TahSpec(alloc="128"), "tah:group=64,int4=0.8,tau=2,low=3,high=4,alloc=128"),
        ("fixed", FixedSpec(), "fixed:bits=8,group=64,round=nearest"),
        ("fixed:round=stochastic,bits=6", FixedSpec(bits=6, round="stochastic"), None),
        (" raw ", RawSpec(), "raw:dtype=fp32"),
        ("raw:dtype=bf16", RawSpec(dtype="bf16"), "raw:dtype=bf16"),
        ("eden", EdenSpec(), "eden:bits=3,group=256"),
        ("eden:group=64,bits=10/3", EdenSpec(Fraction(10, 3), 64), "eden:bits=10/3,group=64"),
        ("wf", WfSpec(), "wf:bits=4,group=128,center=on"),
        ("wf:center=off,bits=4.00", WfSpec(center="off"), "wf:bits=4,group=128,center=off"),
    ],
)
def test_spec_parses_and_prints(text, spec, canonical):
    assert CodecSpec.parse(text) == spec
    assert CodecSpec.parse(str(spec)) == spec
    if canonical is not None:
        assert str(spec) == canonical


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("taah", "no codec 'taah'; did you mean tah?"),
        ("", "no codec ''; known: raw, fixed, tah"),
        ("tah:", "'' is not key=value"),
        ("tah:group", "'group' is not key=value"),
        ("tah:grup=64", "no parameter 'grup'; did you mean group?"),
        ("tah:group=64,group=32", "group is given twice"),
        ("tah:group=63", "group must be a power of two from 8 to 256; got 63"),
        ("tah:group=512", "group must be a power of two from 8 to 256; got 512"),
        ("tah:group=0", "group must be a power of two"),
        ("tah:group=6_4", "group must be a whole number; got '6_4'"),
        ("tah:int4=1.1", "int4 must be a share from 0 to 1; got 1.1"),
        ("tah:int4=1/0", "int4 divides by zero"),
        ("tah:int4=1e-999999999", "int4 must be a number such as 0.8 or 4/5"),
        ("tah:tau=-1", "tau must be a number or inf; got '-1'"),
        ("tah:tau=nan", "tau must be a number or inf"),
        ("tah:low=1", "low must be a whole number from 2 to 8; got 1"),
        ("tah:low=5", r"high must be a whole number from low \(5\) to 8; got 4"),
        ("tah:high=9", "high must be a whole number from low"),
        ("tah:alloc=tile", "alloc must be group, token, or a number of channels that is a multiple of 8; got tile"),
        ("tah:alloc=100", "alloc must be group, token, or a number of channels that is a multiple of 8; got 100"),
        ("tah:alloc=0", "alloc must be group, token, or a number"),
        ("tah:alloc=064", "alloc must be group, token, or a number"),
        ("tah:alloc=-64", "alloc must be a word; got '-64'"),
        ("tah:select=lowest", "select must be high or low; got lowest"),
        ("tah:adaptive=no", "adaptive must be on or off; got no"),
        ("fixed:bits=1", "bits must be a whole number from 2 to 16; got 1"),
        ("fixed:bits=17", "bits must be a whole number from 2 to 16; got 17"),
        ("fixed:bits=8.0", "bits must be a whole number; got '8.0'"),
        ("fixed:round=up", "round must be nearest or stochastic; got up"),
        ("eden:bits=0.99", "bits must be a number from 1 to 8; got 0.99"),
        ("eden:bits=8.01", "bits must be a number from 1 to 8; got 8.01"),
        ("eden:bits=" + "9" * 310, "bits must be a number from 1 to 8; got 9{310}$"),
        ("tah:int4=" + "9" * 400, "int4 must be a share from 0 to 1; got 9{400}$"),
        ("eden:bits=two", "bits must be a number such as 0.8 or 4/5; got 'two'"),
        ("eden:group=512", "group must be a power of two from 8 to 256; got 512"),
        ("wf:bits=9", "bits must be a number from 1 to 8; got 9"),
        ("wf:center=yes", "center must be on or off; got yes"),
        ("raw:dtype=fp8", "dtype must be fp32, fp16 or bf16; got fp8"),
        ("raw:dtype=FP32", "dtype must be a word; got 'FP32'"),
    ],
)
def test_bad_spec_is_refused_with_the_reason(text, message):
    with pytest.raises(ConfigError, match=message):
        get_codec(text)


@given(
    group=st.sampled_from([8, 16, 32, 64, 128, 256]),
    int4=st.fractions(0, 1),
    tau=st.floats(min_value=0, allow_nan=False),
    bits=st.tuples(st.integers(2, 8), st.integers(2, 8)),
    alloc=st.sampled_from(["group", "token"]) | st.integers(1, 10**6).map(lambda tiles: str(8 * tiles)),
    select=st.sampled_from(["high", "low"]),
    adaptive=st.sampled_from(["on", "off"]),
)
def test_canonical_text_reads_back_as_the_same_spec(group, int4, tau, bits, alloc, select, adaptive):
    spec = TahSpec(group, int4, tau, min(bits), max(bits), alloc, select, adaptive)
    assert CodecSpec.parse(str(spec)) == spec


SPEC_LIKE = r"(tah|fixed|raw|eden|wf):[a-z0-9]+=[^,]{0,12}(,[a-z0-9]+=.*)?"


@given(st.text(max_size=30) | st.from_regex(SPEC_LIKE, fullmatch=True))
def test_any_text_is_a_spec_or_a_config_error(text):
    try:
        spec = CodecSpec.parse(text)
    except ConfigError:
        return
    assert CodecSpec.parse(str(spec)) == spec
