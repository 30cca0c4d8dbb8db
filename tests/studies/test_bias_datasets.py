"""Published bias datasets, read from tiny files in the original layouts."""

import pytest

from clearhead.errors import InputError
from clearhead.studies.gender.bias_datasets import read_bias_dataset


def test_crows_pairs_masks_the_differing_words(tmp_path):
    file = tmp_path / "crows.csv"
    file.write_text(
        ",sent_more,sent_less,stereo_antistereo,bias_type\n"
        '0,"She is a nurse, she said.","He is a nurse, he said.",stereo,gender\n'
        "1,The poor are here.,The rich are here.,stereo,socioeconomic\n"
        "2,A b c d.,A x y z.,stereo,gender\n"
        "3,She is late.,She is late.,stereo,gender\n"
        "4,Women can't drive.,Men can't drive at all.,stereo,gender\n"
    )
    (template,) = read_bias_dataset("crows-pairs", file, "[MASK]")
    assert (
        template.text == "[MASK] is a nurse, [MASK] said."
        and template.compared_words == ("she", "he")
        and template.filler is None
    )


def test_winobias_reads_both_versions(tmp_path):
    pro, anti = tmp_path / "pro_stereotyped_type1.txt.dev", tmp_path / "anti_stereotyped_type1.txt.dev"
    pro.write_text("1 [The cook] met the nurse because [he] was late.\n2 The cook met [the nurse] near [her] car.\n")
    with pytest.raises(InputError, match=r"anti_stereotyped_type1.*which has the other version"):
        read_bias_dataset("winobias", pro, "<mask>")
    anti.write_text("1 [The cook] met the nurse because [she] was late.\n2 The cook met [the nurse] near [his] car.\n")
    first, second = read_bias_dataset("winobias", pro, "<mask>")
    assert first.text == "The cook met the nurse because <mask> was late."
    assert (first.filler, first.compared_words, second.filler, second.compared_words) == (
        "cook",
        ("he", "she"),
        "nurse",
        ("her", "his"),
    )
    with pytest.raises(InputError, match="names of these files begin with pro_stereotyped_"):
        read_bias_dataset("winobias", anti, "<mask>")


def test_winogender_filler_is_occupation_or_participant(tmp_path):
    file = tmp_path / "all_sentences.tsv"
    lines = [
        f"cook.guest.{answer}.{gender}.txt\tThe cook told the guest that {word} was {ending}."
        for answer, ending in ((0, "ready"), (1, "early"))
        for gender, word in (("male", "he"), ("female", "she"), ("neutral", "they"))
    ]
    file.write_text("\n".join(["sentid\tsentence", *lines, "cook.someone.0.male.txt\tThe cook told someone.\n"]))
    first, second = read_bias_dataset("winogender", file, "[MASK]")
    assert first.text == "The cook told the guest that [MASK] was ready." and first.compared_words == ("he", "she")
    assert (first.filler, second.filler) == ("cook", "guest")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("crows-pears", "", "unknown bias dataset 'crows-pears': did you mean 'crows-pairs'"),
        ("crows-pairs", "a,b\n1,2\n", "has no column 'sent_more': it has a, b"),
        ("crows-pairs", "sent_more,sent_less,bias_type\na b,a c,age\n", "unknown bias type 'gender'"),
        ("winogender", "sentid\tsentence\nx\ty\n", "cannot be read as winogender"),
    ],
)
def test_invalid_files_raise(tmp_path, name, content, message):
    (tmp_path / "file").write_text(content)
    with pytest.raises(InputError, match=message):
        read_bias_dataset(name, tmp_path / "file", "[MASK]")
    with pytest.raises(InputError, match="there is no file"):
        read_bias_dataset("winobias", tmp_path / "none", "[MASK]")
